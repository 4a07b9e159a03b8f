// ppo_minibatch computes the loss of a minibatch and all its gradients, as one node of the autograd graph. With a node
// for each operation, 128 rows of a small policy take 1.4 times as long. minibatch_loss in fastsync/ppo/ppo.py is the
// specification, for a policy of two perceptrons and one choice a step.
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "ppo/operators.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;

struct Minibatch {
  at::Tensor observations, actions;
  Layers actor, critic;
  Columns columns;  // forward computes the first three; the caller gives the others
  Coefficients coefficients;
};

class Loss : public torch::autograd::Function<Loss> {
 public:
  static Tensors forward(AutogradContext* context, at::TensorList /*parameters*/, Minibatch& batch) {
    auto actor = layers_forward(batch.observations, batch.actor);
    auto critic = layers_forward(batch.observations, batch.critic);
    const auto choices = evaluate_choices(actor.back(), batch.actions);
    batch.columns[0] = choices.log_prob;
    batch.columns[1] = choices.entropy;
    batch.columns[2] = critic.back().squeeze(1);
    const auto results = objective(batch.columns, batch.coefficients);
    actor.back() = choices_backward(choices, batch.actions, results[2], results[3]);
    critic.back() = results[4].unsqueeze(1);
    Tensors saved;
    for (const auto* each : {&actor, &critic, &batch.actor.weights, &batch.critic.weights}) {
      saved.insert(saved.end(), each->begin(), each->end());
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["actor"] = static_cast<int64_t>(batch.actor.weights.size());
    context->mark_non_differentiable({results[1]});
    return {results[0], results[1]};
  }

  static Tensors backward(AutogradContext* context, const Tensors& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::ppo_minibatch has no second derivative");
    const auto saved = context->get_saved_variables();
    const at::TensorList all(saved);
    // `all` has each layer's inputs and the output's gradient, of the actor and then of the critic. Then come all
    // weights.
    const size_t actor_layers = context->saved_data["actor"].toInt(), num_layers = saved.size() / 2 - 1;
    const size_t critic_layers = num_layers - actor_layers;
    const auto weights = all.slice(num_layers + 2);
    const auto grads = scaled({all[actor_layers], all[num_layers + 1]}, grad_outputs.front());
    auto result = layers_backward(all.slice(0, actor_layers), weights.slice(0, actor_layers), grads[0], false);
    const auto critic_grads =
        layers_backward(all.slice(actor_layers + 1, critic_layers), weights.slice(actor_layers), grads[1], false);
    result.erase(result.begin());  // the observations have no gradient
    result.insert(result.end(), critic_grads.begin() + 1, critic_grads.end());
    result.emplace_back();  // the batch has no gradient
    return result;
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> ppo_minibatch(const at::Tensor& observations, const at::Tensor& actions,
                                                const Tensors& actor_weights, const Tensors& actor_biases,
                                                const Tensors& critic_weights, const Tensors& critic_biases,
                                                const at::Tensor& old_log_probs, const at::Tensor& advantages,
                                                const at::Tensor& old_values, const at::Tensor& returns,
                                                const at::Tensor& weights, double clip_coef, double vf_coef,
                                                double ent_coef, bool clip_value_loss) {
  TORCH_CHECK_VALUE(observations.dim() == 2, "observations: expected [B, inputs], got ", observations.sizes());
  const int64_t width = observations.size(1);
  Minibatch batch{checked(observations, "observations", observations.sizes()),
                  actions.contiguous(),
                  {actor_weights, actor_biases, width},
                  {critic_weights, critic_biases, width},
                  {at::Tensor{}, at::Tensor{}, at::Tensor{}, old_log_probs, advantages, old_values, returns, weights},
                  {clip_coef, vf_coef, ent_coef, clip_value_loss}};
  Tensors parameters;
  for (const auto* each : {&actor_weights, &actor_biases, &critic_weights, &critic_biases}) {
    parameters.insert(parameters.end(), each->begin(), each->end());
  }
  const auto outputs = Loss::apply(at::TensorList(parameters), batch);
  return {outputs[0], outputs[1]};
}

}  // namespace fastsync
