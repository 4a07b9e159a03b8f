// ppo_objective computes PPO's loss, five figures for logs, and the loss's gradient, in one pass over the rows.
// ppo_loss in fastsync/ppo/ppo.py is the specification.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "ppo/operators.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;

constexpr int64_t kNumFigures = 5;
constexpr size_t kNumVariables = 3;

// One step of a minibatch.
struct Row {
  float log_prob, entropy, value, old_log_prob, advantage, old_value, target;
};

struct Outcome {
  float surrogate, squared_error, approx_kl;
  bool clipped;
  float grad_log_prob;  // d surrogate / d log_prob
  float grad_value;     // d squared_error / d value
};

// Before torch 2.15, clamp passes gradients at its bounds. From then on it does not. A clipped value may lie at a
// bound. A ratio lies there only by the rounding of exp.
constexpr bool kPassesAtBounds = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15;

// Evaluates one row as torch's minimum, maximum and clamp do. If two arguments of these are equal, they share the
// gradient.
Outcome evaluate(const Row& row, float clip, bool clip_value_loss) {
  const float log_ratio = row.log_prob - row.old_log_prob;
  const float ratio = std::exp(log_ratio);
  const float free = ratio * row.advantage;
  const float bounded = std::clamp(ratio, 1 - clip, 1 + clip) * row.advantage;
  Outcome outcome;
  outcome.surrogate = bounded < free ? bounded : free;
  outcome.grad_log_prob = bounded < free ? 0 : free;
  outcome.approx_kl = ratio - 1 - log_ratio;
  outcome.clipped = std::abs(ratio - 1) > clip;

  const float error = row.value - row.target;
  outcome.squared_error = error * error;
  outcome.grad_value = 2 * error;
  if (clip_value_loss) {
    const float moved = row.value - row.old_value;
    const float near_error = row.old_value + std::clamp(moved, -clip, clip) - row.target;
    const bool is_cut = kPassesAtBounds ? std::abs(moved) > clip : std::abs(moved) >= clip;
    const float near_grad = is_cut ? 0 : 2 * near_error;
    const float near_squared = near_error * near_error;
    if (!(near_squared <= outcome.squared_error)) {  // larger, or nan
      outcome.squared_error = near_squared;
      outcome.grad_value = near_grad;
    } else if (near_squared == outcome.squared_error) {
      outcome.grad_value = (outcome.grad_value + near_grad) / 2;
    }
  }
  return outcome;
}

// Returns the loss, its figures and its gradients, as objective does.
Tensors evaluate_rows(const Columns& columns, const Coefficients& coefficients) {
  const at::Tensor& like = columns.front();
  Tensors results{like.new_empty({}), like.new_empty({kNumFigures}), at::empty_like(like), at::empty_like(like),
                  at::empty_like(like)};
  const auto column = [&](size_t index) { return columns[index].const_data_ptr<float>(); };
  const float *log_prob = column(0), *entropy = column(1), *values = column(2), *old_log_probs = column(3),
              *advantages = column(4), *old_values = column(5), *returns = column(6), *weights = column(7);
  auto* grad_log_prob = results[2].data_ptr<float>();
  auto* grad_entropy = results[3].data_ptr<float>();
  auto* grad_values = results[4].data_ptr<float>();
  const float clip = static_cast<float>(coefficients.clip);
  const float value_weight = static_cast<float>(coefficients.value / 2);
  const float entropy_weight = static_cast<float>(coefficients.entropy);
  const int64_t num_rows = like.numel();
  double surrogate = 0, squared_error = 0, total_entropy = 0, approx_kl = 0, clipped = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const auto outcome =
        evaluate({log_prob[i], entropy[i], values[i], old_log_probs[i], advantages[i], old_values[i], returns[i]}, clip,
                 coefficients.clip_value_loss);
    const float weight = weights[i];
    grad_log_prob[i] = -weight * outcome.grad_log_prob;
    grad_entropy[i] = -weight * entropy_weight;
    grad_values[i] = weight * value_weight * outcome.grad_value;
    surrogate += double{weight} * double{outcome.surrogate};
    squared_error += double{weight} * double{outcome.squared_error};
    total_entropy += double{weight} * double{entropy[i]};
    approx_kl += double{weight} * double{outcome.approx_kl};
    clipped += outcome.clipped ? double{weight} : 0.0;
  }
  *results[0].data_ptr<float>() =
      static_cast<float>(coefficients.value / 2 * squared_error - surrogate - coefficients.entropy * total_entropy);
  const double figures[kNumFigures] = {-surrogate, squared_error / 2, total_entropy, approx_kl, clipped};
  std::copy(std::begin(figures), std::end(figures), results[1].data_ptr<float>());
  return results;
}

}  // namespace

Tensors objective(Columns columns, const Coefficients& coefficients) {
  const auto shape = columns.front().sizes().vec();
  TORCH_CHECK_VALUE(coefficients.clip >= 0, "clip_coef: expected a number from 0 on, got ", coefficients.clip);
  for (size_t i = 0; i < columns.size(); ++i) {
    TORCH_CHECK_VALUE(i < kNumVariables || !columns[i].requires_grad(), kColumnNames[i],
                      ": expected constants, got a tensor that requires a gradient");
    columns[i] = checked(columns[i], kColumnNames[i], shape);
  }
  return evaluate_rows(columns, coefficients);
}

Tensors scaled(Tensors grads, const at::Tensor& grad_loss) {
  if (grad_loss.item<double>() != 1) {  // loss.backward() begins with 1
    for (at::Tensor& grad : grads) {
      grad = grad_loss * grad;
    }
  }
  return grads;
}

namespace {

class Objective : public torch::autograd::Function<Objective> {
 public:
  static Tensors forward(AutogradContext* context, const at::Tensor& log_prob, const at::Tensor& entropy,
                         const at::Tensor& values, Columns columns, const Coefficients& coefficients) {
    columns[0] = log_prob;
    columns[1] = entropy;
    columns[2] = values;
    const auto results = objective(columns, coefficients);
    context->save_for_backward({results[2], results[3], results[4]});
    context->mark_non_differentiable({results[1]});
    return {results[0], results[1]};
  }

  static Tensors backward(AutogradContext* context, const Tensors& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::ppo_objective has no second derivative");
    auto grads = scaled(context->get_saved_variables(), grad_outputs.front());
    grads.resize(kNumVariables + 2);  // columns and coefficients have no gradient
    return grads;
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> ppo_objective(const at::Tensor& log_prob, const at::Tensor& entropy,
                                                const at::Tensor& values, const at::Tensor& old_log_probs,
                                                const at::Tensor& advantages, const at::Tensor& old_values,
                                                const at::Tensor& returns, const at::Tensor& weights, double clip_coef,
                                                double vf_coef, double ent_coef, bool clip_value_loss) {
  const Columns columns{log_prob, entropy, values, old_log_probs, advantages, old_values, returns, weights};
  const auto outputs =
      Objective::apply(log_prob, entropy, values, columns, Coefficients{clip_coef, vf_coef, ent_coef, clip_value_loss});
  return {outputs[0], outputs[1]};
}

}  // namespace fastsync
