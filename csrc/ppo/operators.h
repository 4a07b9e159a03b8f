// The trainer's operators, and what they compute without autograd, so that one may be a part of another.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <utility>
#include <vector>

namespace fastsync {

using Tensors = std::vector<at::Tensor>;

// The tensor, contiguous. A ValueError unless it is float32 of that shape on the CPU.
at::Tensor checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape);

// Weights [outputs, inputs] and biases [outputs], one of each for each layer.
struct Layers {
  Tensors weights, biases;

  // A ValueError unless they fit to each other and to rows of that width.
  Layers(at::TensorList weights, at::TensorList biases, int64_t width);
};

// What each layer is given, and then what the last one makes of it: [B, inputs] or [B, outputs].
Tensors layers_forward(const at::Tensor& rows, const Layers& layers);

// The gradients of the rows, undefined unless of_rows, then of all weights, then of all biases.
Tensors layers_backward(at::TensorList inputs, at::TensorList weights, const at::Tensor& grad_outputs, bool of_rows);

// Of logits [B, n] and the choices taken [B].
struct Choices {
  at::Tensor log_prob, entropy;  // [B]
  at::Tensor log_probabilities;  // [B, n]
};
Choices evaluate_choices(const at::Tensor& logits, const at::Tensor& actions);

// The gradient of the logits.
at::Tensor choices_backward(const Choices& choices, const at::Tensor& actions, const at::Tensor& grad_log_prob,
                            const at::Tensor& grad_entropy);

// The objective's columns, each with a value for each row: the first three have gradients.
constexpr std::array kColumnNames{"log_prob",   "entropy",    "values",  "old_log_probs",
                                  "advantages", "old_values", "returns", "weights"};
using Columns = std::array<at::Tensor, kColumnNames.size()>;

struct Coefficients {
  double clip;
  double value;
  double entropy;
  bool clip_value_loss;
};

// The loss, what is logged of it [5], and the gradients of the first three columns. A ValueError unless the columns
// are float32 of one shape on the CPU.
Tensors objective(Columns columns, const Coefficients& coefficients);

// Gradients of a loss, from those for a gradient of 1.
Tensors scaled(Tensors grads, const at::Tensor& grad_loss);

// The operators. fused.py in fastsync/ppo calls them in place of plain functions, which say what the arguments are.

at::Tensor perceptron(const at::Tensor& input, const Tensors& weights, const Tensors& biases);

// log_prob and entropy.
std::pair<at::Tensor, at::Tensor> categorical(const at::Tensor& logits, const at::Tensor& actions);

// The likeliest of logits + noise.
at::Tensor choose(const at::Tensor& logits, const at::Tensor& noise);

// The loss, and what is logged of it.
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
