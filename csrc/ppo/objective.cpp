// torch.ops.fastsync.ppo_objective: PPO's loss and what is logged of it, with its gradient, in one pass over the rows
// on the CPU. ppo_loss in fastsync/ppo/ppo.py is the specification.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <tuple>

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kNumFigures = 5;

struct Coefficients {
  double clip;
  double value;
  double entropy;
  bool clip_value_loss;
};

// One step's part of a minibatch.
template <typename T>
struct Row {
  T log_prob, entropy, value, old_log_prob, advantage, old_value, target;
};

template <typename T>
struct Outcome {
  T surrogate, squared_error, approx_kl;
  bool clipped;
  T grad_log_prob, grad_value;  // of surrogate and of squared_error
};

// As torch's minimum, maximum and clamp have it: a clamp passes gradients at its bounds, and equal arguments share one.
template <typename T>
Outcome<T> evaluate(const Row<T>& row, T clip, bool clip_value_loss) {
  const T log_ratio = row.log_prob - row.old_log_prob;
  const T ratio = std::exp(log_ratio);
  const T free = ratio * row.advantage;
  const T bounded = std::clamp(ratio, 1 - clip, 1 + clip) * row.advantage;
  Outcome<T> outcome;
  outcome.surrogate = bounded < free ? bounded : free;
  outcome.grad_log_prob = bounded < free ? 0 : free;
  outcome.approx_kl = ratio - 1 - log_ratio;
  outcome.clipped = std::abs(ratio - 1) > clip;

  const T error = row.value - row.target;
  outcome.squared_error = error * error;
  outcome.grad_value = 2 * error;
  if (clip_value_loss) {
    const T moved = row.value - row.old_value;
    const T near_error = row.old_value + std::clamp(moved, -clip, clip) - row.target;
    const T near_grad = std::abs(moved) > clip ? 0 : 2 * near_error;
    const T near_squared = near_error * near_error;
    if (!(near_squared <= outcome.squared_error)) {  // larger, or nan
      outcome.squared_error = near_squared;
      outcome.grad_value = near_grad;
    } else if (near_squared == outcome.squared_error) {
      outcome.grad_value = (outcome.grad_value + near_grad) / 2;
    }
  }
  return outcome;
}

// A row's values, in the order of the operator's arguments: the first three have gradients.
constexpr std::array kNames{"log_prob",   "entropy",    "values",  "old_log_probs",
                            "advantages", "old_values", "returns", "weights"};
constexpr size_t kNumVariables = 3;
using Columns = std::array<at::Tensor, kNames.size()>;

// The loss and its figures, then the gradients.
template <typename T>
variable_list evaluate_rows(const Columns& columns, const Coefficients& coefficients) {
  const at::Tensor& like = columns.front();
  variable_list results{like.new_empty({}), like.new_empty({kNumFigures}), at::empty_like(like), at::empty_like(like),
                        at::empty_like(like)};
  const auto column = [&](size_t index) { return columns[index].const_data_ptr<T>(); };
  const T *log_prob = column(0), *entropy = column(1), *values = column(2), *old_log_probs = column(3),
          *advantages = column(4), *old_values = column(5), *returns = column(6), *weights = column(7);
  auto* grad_log_prob = results[2].data_ptr<T>();
  auto* grad_entropy = results[3].data_ptr<T>();
  auto* grad_values = results[4].data_ptr<T>();
  const T clip = static_cast<T>(coefficients.clip);
  const T value_weight = static_cast<T>(coefficients.value / 2);
  const T entropy_weight = static_cast<T>(coefficients.entropy);
  const int64_t num_rows = like.numel();
  double surrogate = 0, squared_error = 0, total_entropy = 0, approx_kl = 0, clipped = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    const auto outcome =
        evaluate<T>({log_prob[i], entropy[i], values[i], old_log_probs[i], advantages[i], old_values[i], returns[i]},
                    clip, coefficients.clip_value_loss);
    const T weight = weights[i];
    grad_log_prob[i] = -weight * outcome.grad_log_prob;
    grad_entropy[i] = -weight * entropy_weight;
    grad_values[i] = weight * value_weight * outcome.grad_value;
    surrogate += double{weight} * double{outcome.surrogate};
    squared_error += double{weight} * double{outcome.squared_error};
    total_entropy += double{weight} * double{entropy[i]};
    approx_kl += double{weight} * double{outcome.approx_kl};
    clipped += outcome.clipped ? double{weight} : 0.0;
  }
  *results[0].data_ptr<T>() =
      static_cast<T>(coefficients.value / 2 * squared_error - surrogate - coefficients.entropy * total_entropy);
  const double figures[kNumFigures] = {-surrogate, squared_error / 2, total_entropy, approx_kl, clipped};
  std::copy(std::begin(figures), std::end(figures), results[1].data_ptr<T>());
  return results;
}

class Objective : public torch::autograd::Function<Objective> {
 public:
  static variable_list forward(AutogradContext* context, const Variable& log_prob, const Variable& entropy,
                               const Variable& values, Columns columns, const Coefficients& coefficients) {
    columns[0] = log_prob;
    columns[1] = entropy;
    columns[2] = values;
    for (at::Tensor& column : columns) {
      column = column.contiguous();
    }
    const auto results = AT_DISPATCH_FLOATING_TYPES(log_prob.scalar_type(), "ppo_objective",
                                                    [&] { return evaluate_rows<scalar_t>(columns, coefficients); });
    context->save_for_backward({results[2], results[3], results[4]});
    context->mark_non_differentiable({results[1]});
    return {results[0], results[1]};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::ppo_objective has no second derivative");
    const auto saved = context->get_saved_variables();
    const at::Tensor& grad = grad_outputs.front();
    if (grad.item<double>() == 1) {  // as loss.backward() begins
      return {saved[0], saved[1], saved[2], {}, {}};
    }
    return {grad * saved[0], grad * saved[1], grad * saved[2], {}, {}};
  }
};

std::tuple<at::Tensor, at::Tensor> ppo_objective(const at::Tensor& log_prob, const at::Tensor& entropy,
                                                 const at::Tensor& values, const at::Tensor& old_log_probs,
                                                 const at::Tensor& advantages, const at::Tensor& old_values,
                                                 const at::Tensor& returns, const at::Tensor& weights, double clip_coef,
                                                 double vf_coef, double ent_coef, bool clip_value_loss) {
  TORCH_CHECK_VALUE(log_prob.device().is_cpu() && at::isFloatingType(log_prob.scalar_type()),
                    "log_prob: expected real numbers on the CPU, got ", log_prob.scalar_type(), " on ",
                    log_prob.device());
  TORCH_CHECK_VALUE(clip_coef >= 0, "clip_coef: expected a number from 0 on, got ", clip_coef);
  const Columns columns{log_prob, entropy, values, old_log_probs, advantages, old_values, returns, weights};
  for (size_t i = 1; i < columns.size(); ++i) {
    const at::Tensor& column = columns[i];
    TORCH_CHECK_VALUE(column.sizes() == log_prob.sizes() && column.scalar_type() == log_prob.scalar_type() &&
                          column.device().is_cpu(),
                      kNames[i], ": expected ", log_prob.scalar_type(), " ", log_prob.sizes(),
                      " on the CPU like log_prob, got ", column.scalar_type(), " ", column.sizes(), " on ",
                      column.device());
    TORCH_CHECK_VALUE(i < kNumVariables || !column.requires_grad(), kNames[i],
                      ": expected constants, got a tensor that requires a gradient");
  }
  const auto outputs =
      Objective::apply(log_prob, entropy, values, columns, Coefficients{clip_coef, vf_coef, ent_coef, clip_value_loss});
  return {outputs[0], outputs[1]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def(
      "ppo_objective(Tensor log_prob, Tensor entropy, Tensor values, Tensor old_log_probs, Tensor advantages, Tensor "
      "old_values, Tensor returns, Tensor weights, float clip_coef, float vf_coef, float ent_coef, bool "
      "clip_value_loss) -> (Tensor loss, Tensor figures)",
      ppo_objective);
}

}  // namespace fastsync
