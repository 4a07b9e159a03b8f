// torch.ops.fastsync.perceptron: linear layers with tanh between them, as one node of the autograd graph, in single
// precision on the CPU.
//
// A small policy's layers take less time to compute than to call, record and walk back through one by one.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "ppo/float_loops.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Matrix as_it_is(const at::Tensor& tensor) { return {tensor.const_data_ptr<float>(), tensor.size(1), 1}; }
Matrix transposed(const at::Tensor& tensor) { return {tensor.const_data_ptr<float>(), 1, tensor.size(1)}; }

// As matmul, into a new tensor.
at::Tensor product(const Matrix& left, const Matrix& right, const float* addend, int64_t rows, int64_t inner,
                   int64_t columns) {
  auto result = at::empty({rows, columns}, at::kFloat);
  matmul(left, right, addend, rows, inner, columns, result.data_ptr<float>());
  return result;
}

// What each layer gives, activated but for the last one's: [B, outputs] of rows [B, inputs].
variable_list layers_forward(at::Tensor rows, at::TensorList weights, at::TensorList biases) {
  variable_list outputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t num_inputs = weights[i].size(1), num_outputs = weights[i].size(0);
    rows = product(as_it_is(rows), transposed(weights[i]), biases[i].const_data_ptr<float>(), rows.size(0), num_inputs,
                   num_outputs);
    if (i + 1 < weights.size()) {
      fast_tanh(rows.data_ptr<float>(), rows.numel());
    }
    outputs.push_back(rows);
  }
  return outputs;
}

class Perceptron : public torch::autograd::Function<Perceptron> {
 public:
  static Variable forward(AutogradContext* context, const Variable& rows, at::TensorList weights,
                          at::TensorList biases) {
    auto outputs = layers_forward(rows, weights, biases);
    variable_list saved{rows};
    saved.insert(saved.end(), outputs.begin(), outputs.end() - 1);
    saved.insert(saved.end(), weights.begin(), weights.end());
    context->save_for_backward(std::move(saved));
    return outputs.back();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "fastsync::perceptron has no second derivative");
    const auto saved = context->get_saved_variables();
    const size_t num_layers = saved.size() / 2;
    variable_list grads(2 * num_layers + 1);  // in the order of forward's arguments
    at::Tensor grad = grad_outputs.front().contiguous();
    at::Tensor bias_grad = grad.sum(0);
    for (size_t i = num_layers; i-- > 0;) {
      const at::Tensor& inputs = saved[i];
      const at::Tensor& weight = saved[num_layers + i];
      const int64_t num_rows = grad.size(0), num_inputs = weight.size(1), num_outputs = weight.size(0);
      grads[1 + i] = product(transposed(grad), as_it_is(inputs), nullptr, num_outputs, num_rows, num_inputs);
      grads[1 + num_layers + i] = bias_grad;
      if (i > 0 || context->needs_input_grad(0)) {
        grad = product(as_it_is(grad), as_it_is(weight), nullptr, num_rows, num_outputs, num_inputs);
      }
      if (i > 0) {
        bias_grad = at::empty({num_inputs}, at::kFloat);
        tanh_backward(grad.data_ptr<float>(), inputs.const_data_ptr<float>(), num_rows, num_inputs,
                      bias_grad.data_ptr<float>());
      }
    }
    if (context->needs_input_grad(0)) {
      grads[0] = grad;
    }
    return grads;
  }
};

// As they are, if there are as many as the shape says, in single precision on the CPU.
at::Tensor checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.sizes() == shape, name,
                    ": expected float32 ", shape, " on the CPU, got ", tensor.scalar_type(), " ", tensor.sizes(),
                    " on ", tensor.device());
  return tensor.contiguous();
}

at::Tensor perceptron(const at::Tensor& input, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() == biases.size(), "biases: expected ", weights.size(),
                    ", one for each of the layers, at least one, got ", biases.size());
  TORCH_CHECK_VALUE(input.dim() > 0, "input: expected [..., inputs], got a single number");
  auto rows = checked(input, "input", input.sizes());
  if (input.dim() != 2) {
    rows = rows.reshape({-1, input.size(-1)});
  }
  std::vector<at::Tensor> own_weights, own_biases;
  int64_t width = rows.size(1);
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t outputs = biases[i].numel();
    own_weights.push_back(checked(weights[i], "weights", {outputs, width}));
    own_biases.push_back(checked(biases[i], "biases", {outputs}));
    width = outputs;
  }
  const auto output = at::GradMode::is_enabled()
                          ? Perceptron::apply(rows, at::TensorList(own_weights), at::TensorList(own_biases))
                          : layers_forward(rows, own_weights, own_biases).back();
  if (input.dim() == 2) {
    return output;
  }
  auto shape = input.sizes().vec();
  shape.back() = width;
  return output.view(shape);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("perceptron(Tensor input, Tensor[] weights, Tensor[] biases) -> Tensor", perceptron);
}

}  // namespace fastsync
