// The operators of the PPO trainer, and the functions without autograd that they consist of.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <utility>
#include <vector>

namespace fastsync {

using Tensors = std::vector<at::Tensor>;

// Returns the tensor, made contiguous. Throws ValueError unless it is float32 of that shape on the CPU.
at::Tensor checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape);

// The weights [outputs, inputs] and biases [outputs] of each layer.
struct Layers {
  Tensors weights, biases;

  // Throws ValueError unless the layers fit each other, and the first one fits rows of that width.
  Layers(at::TensorList weights, at::TensorList biases, int64_t width);
};

// Returns the input [B, inputs] of each layer, followed by the output [B, outputs] of the last one.
Tensors layers_forward(const at::Tensor& rows, const Layers& layers);

// Returns the gradients of the rows, of all weights and of all biases, in this order. The rows' gradient is undefined
// unless rows_need_grad.
Tensors layers_backward(at::TensorList inputs, at::TensorList weights, const at::Tensor& grad_outputs,
                        bool rows_need_grad);

// The results of evaluate_choices for logits [B, n] and the choices that were taken, called actions [B].
struct Choices {
  at::Tensor log_prob, entropy;  // [B]: the actions' log-probabilities, and the distributions' entropies
  at::Tensor log_probabilities;  // [B, n]: the log-probabilities of all choices
};
Choices evaluate_choices(const at::Tensor& logits, const at::Tensor& actions);

// Returns the gradient of the logits.
at::Tensor choices_backward(const Choices& choices, const at::Tensor& actions, const at::Tensor& grad_log_prob,
                            const at::Tensor& grad_entropy);

// The objective's arguments: one value for each row. The first three have gradients.
constexpr std::array kColumnNames{"log_prob",   "entropy",    "values",  "old_log_probs",
                                  "advantages", "old_values", "returns", "weights"};
using Columns = std::array<at::Tensor, kColumnNames.size()>;

struct Coefficients {
  double clip;
  double value;
  double entropy;
  bool clip_value_loss;
};

// Returns the loss, five figures for logs, and the gradients of the first three columns. Throws ValueError unless the
// columns are float32 of one shape on the CPU.
Tensors objective(Columns columns, const Coefficients& coefficients);

// Multiplies the gradients of a loss by grad_loss.
Tensors scaled(Tensors grads, const at::Tensor& grad_loss);

// These are the operators. fastsync/ppo/fused.py calls them in place of plain functions, which document the arguments.

at::Tensor perceptron(const at::Tensor& input, const Tensors& weights, const Tensors& biases);

// Returns log_prob and entropy.
std::pair<at::Tensor, at::Tensor> categorical(const at::Tensor& logits, const at::Tensor& actions);

// Returns the index of the largest of logits + noise, for each row.
at::Tensor choose(const at::Tensor& logits, const at::Tensor& noise);

// The next two return the loss, and five figures for logs.
std::pair<at::Tensor, at::Tensor> ppo_objective(const at::Tensor& log_prob, const at::Tensor& entropy,
                                                const at::Tensor& values, const at::Tensor& old_log_probs,
                                                const at::Tensor& advantages, const at::Tensor& old_values,
                                                const at::Tensor& returns, const at::Tensor& weights, double clip_coef,
                                                double vf_coef, double ent_coef, bool clip_value_loss);
std::pair<at::Tensor, at::Tensor> ppo_minibatch(const at::Tensor& observations, const at::Tensor& actions,
                                                const Tensors& actor_weights, const Tensors& actor_biases,
                                                const Tensors& critic_weights, const Tensors& critic_biases,
                                                const at::Tensor& old_log_probs, const at::Tensor& advantages,
                                                const at::Tensor& old_values, const at::Tensor& returns,
                                                const at::Tensor& weights, double clip_coef, double vf_coef,
                                                double ent_coef, bool clip_value_loss);

}  // namespace fastsync
