// torch.ops.fastsync.perceptron: linear layers with an activation between them, as one node of the autograd graph.
//
// A small policy's layers take less time to compute than to call, record and walk back through one by one.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "ppo/float_loops.h"
#include "ppo/matmul.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

enum class Activation : int64_t { kTanh, kRelu, kElu };

Activation activation_from_name(std::string_view name) {
  TORCH_CHECK_VALUE(name == "tanh" || name == "relu" || name == "elu",
                    "activation: expected 'tanh', 'relu' or 'elu', got '", name, "'");
  return name == "tanh" ? Activation::kTanh : name == "relu" ? Activation::kRelu : Activation::kElu;
}

bool suits_float_loops(const at::Tensor& values) {
  return values.device().is_cpu() && values.scalar_type() == at::kFloat && values.is_contiguous();
}

void activate_(at::Tensor& values, Activation activation) {
  switch (activation) {
    case Activation::kTanh:
      if (suits_float_loops(values)) {
        fast_tanh(values.data_ptr<float>(), values.numel());
      } else {
        values.tanh_();
      }
      return;
    case Activation::kRelu:
      values.relu_();
      return;
    case Activation::kElu:
      at::elu_(values);
      return;
  }
}

// The gradient of a layer's outputs from that of its activations, which it may overwrite, and its sum over rows: the
// bias's. From the activations themselves, so that nothing else has to be kept.
std::pair<at::Tensor, at::Tensor> activation_backward(at::Tensor grad, const at::Tensor& activated,
                                                      Activation activation) {
  switch (activation) {
    case Activation::kTanh:
      if (suits_float_loops(grad)) {
        auto sums = at::empty({grad.size(1)}, grad.options());
        tanh_backward(grad.data_ptr<float>(), activated.const_data_ptr<float>(), grad.size(0), grad.size(1),
                      sums.data_ptr<float>());
        return {std::move(grad), std::move(sums)};
      }
      grad = at::tanh_backward(grad, activated);
      break;
    case Activation::kRelu:
      grad = at::threshold_backward(grad, activated, 0);
      break;
    case Activation::kElu:
      grad = at::elu_backward(grad, 1, 1, 1, /*is_result=*/true, activated);
      break;
  }
  auto sums = grad.sum(0);
  return {std::move(grad), std::move(sums)};
}

// Of the weights of a layer that lies in a core's second cache; where they do not, libraries are ahead.
constexpr int64_t kSmall = 1 << 16;

bool suits_matmul(const at::Tensor& weight, const at::Tensor& rows) {
  return has_matmul() && weight.numel() <= kSmall && suits_float_loops(weight) && suits_float_loops(rows);
}

Matrix as_it_is(const at::Tensor& tensor) { return {tensor.const_data_ptr<float>(), tensor.size(1), 1}; }
Matrix transposed(const at::Tensor& tensor) { return {tensor.const_data_ptr<float>(), 1, tensor.size(1)}; }

// As matmul, into a new tensor like the one given.
at::Tensor product(const Matrix& left, const Matrix& right, const float* addend, int64_t rows, int64_t inner,
                   int64_t columns, const at::Tensor& like) {
  auto result = at::empty({rows, columns}, like.options());
  matmul(left, right, addend, rows, inner, columns, result.data_ptr<float>());
  return result;
}

// rows [B, inputs], weight [outputs, inputs], bias [outputs]: a layer's outputs [B, outputs].
at::Tensor linear(const at::Tensor& bias, const at::Tensor& rows, const at::Tensor& weight) {
  if (!suits_matmul(weight, rows) || !bias.is_contiguous()) {
    return at::addmm(bias, rows, weight.t());
  }
  const int64_t inputs = weight.size(1), outputs = weight.size(0);
  std::vector<float> by_input(static_cast<size_t>(weight.numel()));
  transpose(weight.const_data_ptr<float>(), outputs, inputs, by_input.data());
  return product(as_it_is(rows), {by_input.data(), outputs, 1}, bias.const_data_ptr<float>(), rows.size(0), inputs,
                 outputs, rows);
}

// From the gradient of its outputs, [B, outputs], that of its inputs.
at::Tensor input_gradient(const at::Tensor& grad, const at::Tensor& weight) {
  if (!suits_matmul(weight, grad)) {
    return at::mm(grad, weight);
  }
  return product(as_it_is(grad), as_it_is(weight), nullptr, grad.size(0), weight.size(0), weight.size(1), grad);
}

// Libraries add up all rows in one float each, which loses digits; blocks of so many rows are added up on their own.
constexpr int64_t kRowsInBlock = 1 << 10;

at::Tensor sum_of_blocks(const at::Tensor& grad, const at::Tensor& inputs) {
  const auto grads = grad.split(kRowsInBlock);
  const auto rows = inputs.split(kRowsInBlock);
  auto sum = at::mm(grads[0].t(), rows[0]);
  for (size_t block = 1; block < grads.size(); ++block) {
    sum += at::mm(grads[block].t(), rows[block]);
  }
  return sum;
}

// And that of its weight.
at::Tensor weight_gradient(const at::Tensor& grad, const at::Tensor& inputs, const at::Tensor& weight) {
  if (!suits_matmul(weight, grad) || !suits_float_loops(inputs)) {
    return sum_of_blocks(grad, inputs);
  }
  return product(transposed(grad), as_it_is(inputs), nullptr, weight.size(0), grad.size(0), weight.size(1), weight);
}

void check(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK_VALUE(!weights.empty(), "weights: expected at least one layer, got none");
  TORCH_CHECK_VALUE(weights.size() == biases.size(), "biases: expected ", weights.size(), ", one a layer, got ",
                    biases.size());
  int64_t width = input.dim() > 0 ? input.size(-1) : 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(weights[i].scalar_type() == input.scalar_type() && biases[i].scalar_type() == input.scalar_type(),
                      "weights[", i, "], biases[", i, "]: expected ", input.scalar_type(), " like input, got ",
                      weights[i].scalar_type(), " and ", biases[i].scalar_type());
    TORCH_CHECK_VALUE(weights[i].dim() == 2 && weights[i].size(1) == width, "weights[", i, "]: expected [outputs, ",
                      width, "], got ", weights[i].sizes());
    width = weights[i].size(0);
    TORCH_CHECK_VALUE(biases[i].dim() == 1 && biases[i].size(0) == width, "biases[", i, "]: expected [", width,
                      "], got ", biases[i].sizes());
  }
}

// What each layer gives, activated but for the last one's; rows [B, inputs].
std::vector<at::Tensor> layers_forward(at::Tensor rows, at::TensorList weights, at::TensorList biases,
                                       Activation activation) {
  std::vector<at::Tensor> outputs;
  outputs.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    rows = linear(biases[i], rows, weights[i]);
    if (i + 1 < weights.size()) {
      activate_(rows, activation);
    }
    outputs.push_back(rows);
  }
  return outputs;
}

class Perceptron : public torch::autograd::Function<Perceptron> {
 public:
  static Variable forward(AutogradContext* context, const Variable& rows, at::TensorList weights, at::TensorList biases,
                          Activation activation) {
    auto outputs = layers_forward(rows, weights, biases, activation);
    variable_list saved{rows};
    saved.insert(saved.end(), outputs.begin(), outputs.end() - 1);
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    context->saved_data["activation"] = static_cast<int64_t>(activation);
    return outputs.back();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::perceptron has no second derivative");
    const auto activation = static_cast<Activation>(context->saved_data["activation"].toInt());
    const auto saved = context->get_saved_variables();
    const size_t num_layers = saved.size() / 2;
    // In the order of forward's arguments: rows, weights, biases, activation.
    variable_list grads(2 * num_layers + 2);
    at::Tensor grad = grad_outputs.front();
    at::Tensor bias_grad = grad.sum(0);
    for (size_t i = num_layers; i-- > 0;) {
      const at::Tensor& inputs = saved[i];
      const at::Tensor& weight = saved[num_layers + i];
      if (context->needs_input_grad(1 + i)) {
        grads[1 + i] = weight_gradient(grad, inputs, weight);
      }
      if (context->needs_input_grad(1 + num_layers + i)) {
        grads[1 + num_layers + i] = bias_grad;
      }
      if (i > 0) {
        std::tie(grad, bias_grad) = activation_backward(input_gradient(grad, weight), inputs, activation);
      } else if (context->needs_input_grad(0)) {
        grads[0] = input_gradient(grad, weight);
      }
    }
    return grads;
  }
};

at::Tensor perceptron(const at::Tensor& input, at::TensorList weights, at::TensorList biases,
                      std::string_view activation_name) {
  // Casts of 16 bits belong to each layer: under autocast this computes as without.
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto activation = activation_from_name(activation_name);
  check(input, weights, biases);
  const auto rows = input.dim() == 2 ? input : input.reshape({-1, input.size(-1)});
  const auto output = at::GradMode::is_enabled() ? Perceptron::apply(rows, weights, biases, activation)
                                                 : layers_forward(rows, weights, biases, activation).back();
  if (input.dim() == 2) {
    return output;
  }
  auto shape = input.sizes().vec();
  shape.back() = output.size(1);
  return output.reshape(shape);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("perceptron(Tensor input, Tensor[] weights, Tensor[] biases, str activation) -> Tensor", perceptron);
}

}  // namespace fastsync
