// torch.ops.fastsync.categorical: log-probabilities and entropies of choices, with their gradient in one pass on the
// CPU. categorical in fastsync/ppo/policies.py is the specification.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// log_probabilities [B, n] of all choices, log_prob [B] of the one taken, entropy [B].
template <typename T>
void forward_rows(const T* logits, const int64_t* actions, int64_t num_rows, int64_t num_choices, T* log_probabilities,
                  T* log_prob, T* entropy) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* in = logits + row * num_choices;
    T* out = log_probabilities + row * num_choices;
    const T largest = *std::max_element(in, in + num_choices);
    T sum = 0;
    for (int64_t i = 0; i < num_choices; ++i) {
      sum += std::exp(in[i] - largest);
    }
    const T log_sum = std::log(sum);
    T mean = 0;
    for (int64_t i = 0; i < num_choices; ++i) {
      out[i] = (in[i] - largest) - log_sum;
      mean += std::exp(out[i]) * out[i];
    }
    TORCH_CHECK_INDEX(0 <= actions[row] && actions[row] < num_choices, "actions: expected choices from 0 to ",
                      num_choices - 1, ", got ", actions[row]);
    log_prob[row] = out[actions[row]];
    entropy[row] = -mean;
  }
}

// d log_prob / d logits = [taken] - p;  d entropy / d logits = -p (log p + entropy).
template <typename T>
void backward_rows(const T* log_probabilities, const T* entropy, const int64_t* actions, const T* grad_log_prob,
                   const T* grad_entropy, int64_t num_rows, int64_t num_choices, T* grad_logits) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const T* log_p = log_probabilities + row * num_choices;
    T* grad = grad_logits + row * num_choices;
    for (int64_t i = 0; i < num_choices; ++i) {
      grad[i] = -std::exp(log_p[i]) * (grad_log_prob[row] + grad_entropy[row] * (log_p[i] + entropy[row]));
    }
    grad[actions[row]] += grad_log_prob[row];
  }
}

class Categorical : public torch::autograd::Function<Categorical> {
 public:
  static variable_list forward(AutogradContext* context, const Variable& logits, const Variable& actions) {
    const auto rows = logits.contiguous();
    const auto taken = actions.contiguous();
    const auto log_probabilities = at::empty_like(rows);
    const auto log_prob = rows.new_empty(taken.sizes());
    const auto entropy = rows.new_empty(taken.sizes());
    AT_DISPATCH_FLOATING_TYPES(rows.scalar_type(), "categorical", [&] {
      forward_rows<scalar_t>(rows.const_data_ptr<scalar_t>(), taken.const_data_ptr<int64_t>(), taken.numel(),
                             rows.size(-1), log_probabilities.data_ptr<scalar_t>(), log_prob.data_ptr<scalar_t>(),
                             entropy.data_ptr<scalar_t>());
    });
    context->save_for_backward({log_probabilities, entropy, taken});
    return {log_prob, entropy};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::categorical has no second derivative");
    const auto saved = context->get_saved_variables();
    const auto& log_probabilities = saved[0];
    const auto& taken = saved[2];
    const auto grad_log_prob = grad_outputs[0].contiguous();
    const auto grad_entropy = grad_outputs[1].contiguous();
    const auto grad_logits = at::empty_like(log_probabilities);
    AT_DISPATCH_FLOATING_TYPES(log_probabilities.scalar_type(), "categorical_backward", [&] {
      backward_rows<scalar_t>(log_probabilities.const_data_ptr<scalar_t>(), saved[1].const_data_ptr<scalar_t>(),
                              taken.const_data_ptr<int64_t>(), grad_log_prob.const_data_ptr<scalar_t>(),
                              grad_entropy.const_data_ptr<scalar_t>(), taken.numel(), log_probabilities.size(-1),
                              grad_logits.data_ptr<scalar_t>());
    });
    return {grad_logits, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> categorical(const at::Tensor& logits, const at::Tensor& actions) {
  TORCH_CHECK_VALUE(logits.device().is_cpu() && actions.device().is_cpu(),
                    "categorical: expected tensors on the CPU, got logits on ", logits.device(), " and actions on ",
                    actions.device());
  TORCH_CHECK_VALUE(actions.scalar_type() == at::kLong, "actions: expected int64, got ", actions.scalar_type());
  TORCH_CHECK_VALUE(
      logits.dim() > 0 && logits.size(-1) > 0 && actions.sizes() == logits.sizes().slice(0, logits.dim() - 1),
      "actions: expected one for each row of logits ", logits.sizes(), ", got ", actions.sizes());
  const auto outputs = Categorical::apply(logits, actions);
  return {outputs[0], outputs[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("categorical(Tensor logits, Tensor actions) -> (Tensor log_prob, Tensor entropy)", categorical);
}

}  // namespace fastsync
