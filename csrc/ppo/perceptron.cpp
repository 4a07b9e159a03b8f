// perceptron computes linear layers with tanh between them, as one node of the autograd graph. Calling and recording a
// small policy's layers one by one takes longer than computing them.
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <utility>

#include "ppo/float_loops.h"
#include "ppo/operators.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;

// So many rows go through all layers before the next rows do, so that they stay in a core's cache. The number does not
// change sums over rows, because matmul adds up 256 rows at a time.
constexpr int64_t kBlock = 512;

Matrix rows_from(int64_t row, const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>() + row * tensor.size(1), tensor.size(1), 1};
}
Matrix transposed(const Matrix& matrix) { return {matrix.values, matrix.column_stride, matrix.row_stride}; }

}  // namespace

at::Tensor checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.sizes() == shape, name,
                    ": expected float32 ", shape, " on the CPU, got ", tensor.scalar_type(), " ", tensor.sizes(),
                    " on ", tensor.device());
  return tensor.contiguous();
}

Layers::Layers(at::TensorList given_weights, at::TensorList given_biases, int64_t width) {
  TORCH_CHECK_VALUE(!given_weights.empty() && given_weights.size() == given_biases.size(), "biases: expected ",
                    given_weights.size(), ", one for each of the layers, at least one, got ", given_biases.size());
  for (size_t i = 0; i < given_weights.size(); ++i) {
    const int64_t outputs = given_biases[i].numel();
    weights.push_back(checked(given_weights[i], "weights", {outputs, width}));
    biases.push_back(checked(given_biases[i], "biases", {outputs}));
    width = outputs;
  }
}

Tensors layers_forward(const at::Tensor& rows, const Layers& layers) {
  Tensors inputs{rows};
  for (const at::Tensor& weight : layers.weights) {
    inputs.push_back(at::empty({rows.size(0), weight.size(0)}, at::kFloat));
  }
  for (int64_t begin = 0; begin < rows.size(0); begin += kBlock) {
    const int64_t num_rows = std::min(kBlock, rows.size(0) - begin);
    for (size_t i = 0; i < layers.weights.size(); ++i) {
      const at::Tensor& weight = layers.weights[i];
      float* outputs = inputs[i + 1].data_ptr<float>() + begin * weight.size(0);
      matmul(rows_from(begin, inputs[i]), transposed(rows_from(0, weight)),
             {layers.biases[i].const_data_ptr<float>(), 0, 1}, num_rows, weight.size(1), weight.size(0), outputs);
      if (i + 1 < layers.weights.size()) {
        fast_tanh(outputs, num_rows * weight.size(0));
      }
    }
  }
  return inputs;
}

Tensors layers_backward(at::TensorList inputs, at::TensorList weights, const at::Tensor& grad_outputs,
                        bool rows_need_grad) {
  const size_t num_layers = weights.size();
  const at::Tensor outer_grad = grad_outputs.contiguous();
  Tensors grads(2 * num_layers + 1);
  if (rows_need_grad) {
    grads[0] = at::empty_like(inputs[0]);
  }
  Tensors hidden;  // the gradients of each layer's inputs, for a block of rows
  for (size_t i = 0; i < num_layers; ++i) {
    const at::Tensor& weight = weights[i];
    grads[1 + i] = at::zeros_like(weight);
    grads[1 + num_layers + i] = i + 1 < num_layers ? at::zeros({weight.size(0)}, at::kFloat) : outer_grad.sum(0);
    hidden.push_back(at::empty({std::min(kBlock, outer_grad.size(0)), weight.size(1)}, at::kFloat));
  }
  for (int64_t begin = 0; begin < outer_grad.size(0); begin += kBlock) {
    const int64_t num_rows = std::min(kBlock, outer_grad.size(0) - begin);
    Matrix grad = rows_from(begin, outer_grad);
    for (size_t i = num_layers; i-- > 0;) {
      const at::Tensor& weight = weights[i];
      const int64_t num_inputs = weight.size(1), num_outputs = weight.size(0);
      const Matrix layer_inputs = rows_from(begin, inputs[i]);
      float* weight_grad = grads[1 + i].data_ptr<float>();
      matmul(transposed(grad), layer_inputs, {weight_grad, num_inputs, 1}, num_outputs, num_rows, num_inputs,
             weight_grad);
      if (i == 0 && !rows_need_grad) {
        break;
      }
      float* input_grad = i > 0 ? hidden[i].data_ptr<float>() : grads[0].data_ptr<float>() + begin * num_inputs;
      matmul(grad, rows_from(0, weight), {nullptr, 0, 1}, num_rows, num_outputs, num_inputs, input_grad);
      if (i > 0) {
        tanh_backward(input_grad, layer_inputs.values, num_rows, num_inputs, grads[num_layers + i].data_ptr<float>());
      }
      grad = {input_grad, num_inputs, 1};
    }
  }
  return grads;
}

namespace {

class Perceptron : public torch::autograd::Function<Perceptron> {
 public:
  static Variable forward(AutogradContext* context, const Variable& rows, at::TensorList /*weights*/,
                          at::TensorList /*biases*/, const Layers& layers) {
    auto saved = layers_forward(rows, layers);
    auto outputs = std::exchange(saved.back(), layers.weights.front());
    saved.insert(saved.end(), layers.weights.begin() + 1, layers.weights.end());
    context->save_for_backward(std::move(saved));
    return outputs;
  }

  static Tensors backward(AutogradContext* context, const Tensors& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::perceptron has no second derivative");
    const auto saved = context->get_saved_variables();
    const at::TensorList both(saved);
    const size_t num_layers = saved.size() / 2;
    auto grads = layers_backward(both.slice(0, num_layers), both.slice(num_layers), grad_outputs.front(),
                                 context->needs_input_grad(0));
    grads.emplace_back();  // the argument `layers` has no gradient
    return grads;
  }
};

}  // namespace

at::Tensor perceptron(const at::Tensor& input, const Tensors& weights, const Tensors& biases) {
  TORCH_CHECK_VALUE(input.dim() > 0, "input: expected [..., inputs], got a single number");
  auto rows = checked(input, "input", input.sizes());
  if (input.dim() != 2) {
    rows = rows.reshape({-1, input.size(-1)});
  }
  const Layers layers(weights, biases, rows.size(1));
  const auto output = at::GradMode::is_enabled() ? Perceptron::apply(rows, at::TensorList(layers.weights),
                                                                     at::TensorList(layers.biases), layers)
                                                 : layers_forward(rows, layers).back();
  if (input.dim() == 2) {
    return output;
  }
  auto shape = input.sizes().vec();
  shape.back() = layers.biases.back().numel();
  return output.view(shape);
}

}  // namespace fastsync
