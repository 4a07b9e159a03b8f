// The operators of categorical distributions compute log-probabilities and entropies of choices, their gradient, and
// samples. categorical and choose in fastsync/ppo/policies.py are the specification.
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "ppo/operators.h"

namespace fastsync {
namespace {

at::Tensor checked_logits(const at::Tensor& logits) {
  TORCH_CHECK_VALUE(logits.dim() > 0 && logits.size(-1) > 0, "logits: expected [..., choices], got ", logits.sizes());
  return checked(logits, "logits", logits.sizes());
}

}  // namespace

Choices evaluate_choices(const at::Tensor& logits, const at::Tensor& actions) {
  const auto rows = checked_logits(logits);
  const int64_t num_rows = rows.size(0), num_choices = rows.size(1);
  TORCH_CHECK_VALUE(actions.device().is_cpu() && actions.scalar_type() == at::kLong && actions.dim() == 1 &&
                        actions.size(0) == num_rows,
                    "actions: expected Long [", num_rows, "] on the CPU, got ", actions.scalar_type(), " ",
                    actions.sizes(), " on ", actions.device());
  Choices result{rows.new_empty({num_rows}), rows.new_empty({num_rows}), at::empty_like(rows)};
  for (int64_t row = 0; row < num_rows; ++row) {
    const float* in = rows.const_data_ptr<float>() + row * num_choices;
    float* out = result.log_probabilities.data_ptr<float>() + row * num_choices;
    const float largest = *std::max_element(in, in + num_choices);
    float sum = 0;
    for (int64_t i = 0; i < num_choices; ++i) {
      sum += std::exp(in[i] - largest);
    }
    const float log_sum = std::log(sum);
    float mean = 0;
    for (int64_t i = 0; i < num_choices; ++i) {
      out[i] = (in[i] - largest) - log_sum;
      mean += std::exp(out[i]) * out[i];
    }
    const int64_t action = actions.const_data_ptr<int64_t>()[row];
    TORCH_CHECK_INDEX(0 <= action && action < num_choices, "actions: expected choices from 0 to ", num_choices - 1,
                      ", got ", action);
    result.log_prob.data_ptr<float>()[row] = out[action];
    result.entropy.data_ptr<float>()[row] = -mean;
  }
  return result;
}

// d log_prob / d logits = [taken] - p;  d entropy / d logits = -p (log p + entropy).
at::Tensor choices_backward(const Choices& choices, const at::Tensor& actions, const at::Tensor& grad_log_prob,
                            const at::Tensor& grad_entropy) {
  auto grad_logits = at::empty_like(choices.log_probabilities);
  const int64_t num_choices = grad_logits.size(1);
  for (int64_t row = 0; row < grad_logits.size(0); ++row) {
    const float* log_p = choices.log_probabilities.const_data_ptr<float>() + row * num_choices;
    float* grad = grad_logits.data_ptr<float>() + row * num_choices;
    const float entropy = choices.entropy.const_data_ptr<float>()[row];
    const float log_prob_weight = grad_log_prob.const_data_ptr<float>()[row];
    const float entropy_weight = grad_entropy.const_data_ptr<float>()[row];
    for (int64_t i = 0; i < num_choices; ++i) {
      grad[i] = -std::exp(log_p[i]) * (log_prob_weight + entropy_weight * (log_p[i] + entropy));
    }
    grad[actions.const_data_ptr<int64_t>()[row]] += log_prob_weight;
  }
  return grad_logits;
}

namespace {

class Categorical : public torch::autograd::Function<Categorical> {
 public:
  static Tensors forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                         const at::Tensor& actions) {
    const auto choices = evaluate_choices(logits, actions);
    context->save_for_backward({choices.log_prob, choices.entropy, choices.log_probabilities, actions});
    return {choices.log_prob, choices.entropy};
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::categorical has no second derivative");
    const auto saved = context->get_saved_variables();
    return {choices_backward({saved[0], saved[1], saved[2]}, saved[3], grads[0].contiguous(), grads[1].contiguous()),
            {}};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> categorical(const at::Tensor& logits, const at::Tensor& actions) {
  const auto rows = checked_logits(logits);
  TORCH_CHECK_VALUE(actions.sizes() == rows.sizes().slice(0, rows.dim() - 1),
                    "actions: expected one for each row of logits ", rows.sizes(), ", got ", actions.sizes());
  const auto results = Categorical::apply(rows.view({-1, rows.size(-1)}), actions.flatten().contiguous());
  return {results[0].view(actions.sizes()), results[1].view(actions.sizes())};
}

at::Tensor choose(const at::Tensor& logits, const at::Tensor& noise) {
  const auto rows = checked_logits(logits), noises = checked(noise, "noise", logits.sizes());
  auto actions = at::empty(rows.sizes().slice(0, rows.dim() - 1), at::kLong);
  const int64_t num_choices = rows.size(-1);
  for (int64_t row = 0; row < actions.numel(); ++row) {
    const float* row_logits = rows.const_data_ptr<float>() + row * num_choices;
    const float* row_noise = noises.const_data_ptr<float>() + row * num_choices;
    int64_t best = 0;
    float largest = row_logits[0] + row_noise[0];
    // A nan counts as the largest, and the first nan wins.
    for (int64_t i = 1; i < num_choices && largest == largest; ++i) {
      const float value = row_logits[i] + row_noise[i];
      if (!(value <= largest)) {
        best = i;
        largest = value;
      }
    }
    actions.data_ptr<int64_t>()[row] = best;
  }
  return actions;
}

}  // namespace fastsync
