// torch.ops.fastsync.perceptron: linear layers with tanh between them, as one node of the autograd graph, in single
// precision on the CPU.
//
// A small policy's layers take less time to compute than to call, record and walk back through one by one.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ppo/float_loops.h"

namespace fastsync {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Rows that go through all layers before the next ones do, so that they stay in a core's cache. Sums over rows are the
// same with more, for matmul adds up 256 at a time.
constexpr int64_t kBlock = 512;

Matrix rows_from(int64_t row, const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>() + row * tensor.size(1), tensor.size(1), 1};
}
Matrix transposed(const Matrix& matrix) { return {matrix.values, matrix.column_stride, matrix.row_stride}; }

// What each layer gives, activated but for the last one's: [B, outputs] of rows [B, inputs].
variable_list layers_forward(const at::Tensor& rows, at::TensorList weights, at::TensorList biases) {
  variable_list outputs;
  for (const at::Tensor& weight : weights) {
    outputs.push_back(at::empty({rows.size(0), weight.size(0)}, at::kFloat));
  }
  for (int64_t begin = 0; begin < rows.size(0); begin += kBlock) {
    const int64_t num_rows = std::min(kBlock, rows.size(0) - begin);
    Matrix inputs = rows_from(begin, rows);
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t width = weights[i].size(0);
      float* result = outputs[i].data_ptr<float>() + begin * width;
      const Matrix bias{biases[i].const_data_ptr<float>(), 0, 1};
      matmul(inputs, transposed(rows_from(0, weights[i])), bias, num_rows, weights[i].size(1), width, result);
      if (i + 1 < weights.size()) {
        fast_tanh(result, num_rows * width);
      }
      inputs = {result, width, 1};
    }
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
    const at::Tensor outer_grad = grad_outputs.front().contiguous();
    const bool of_input = context->needs_input_grad(0);
    if (of_input) {
      grads[0] = at::empty_like(saved[0]);
    }
    variable_list hidden;  // gradients of each layer's inputs, for a block
    for (size_t i = 0; i < num_layers; ++i) {
      const at::Tensor& weight = saved[num_layers + i];
      grads[1 + i] = at::zeros_like(weight);
      grads[1 + num_layers + i] = i + 1 < num_layers ? at::zeros({weight.size(0)}, at::kFloat) : outer_grad.sum(0);
      hidden.push_back(at::empty({std::min(kBlock, outer_grad.size(0)), weight.size(1)}, at::kFloat));
    }
    for (int64_t begin = 0; begin < outer_grad.size(0); begin += kBlock) {
      const int64_t num_rows = std::min(kBlock, outer_grad.size(0) - begin);
      Matrix grad = rows_from(begin, outer_grad);
      for (size_t i = num_layers; i-- > 0;) {
        const at::Tensor& weight = saved[num_layers + i];
        const int64_t num_inputs = weight.size(1), num_outputs = weight.size(0);
        const Matrix inputs = rows_from(begin, saved[i]);
        float* of_weight = grads[1 + i].data_ptr<float>();
        matmul(transposed(grad), inputs, {of_weight, num_inputs, 1}, num_outputs, num_rows, num_inputs, of_weight);
        if (i == 0 && !of_input) {
          break;
        }
        float* of_inputs = i > 0 ? hidden[i].data_ptr<float>() : grads[0].data_ptr<float>() + begin * num_inputs;
        matmul(grad, rows_from(0, weight), {nullptr, 0, 1}, num_rows, num_outputs, num_inputs, of_inputs);
        if (i > 0) {
          tanh_backward(of_inputs, inputs.values, num_rows, num_inputs, grads[num_layers + i].data_ptr<float>());
        }
        grad = {of_inputs, num_inputs, 1};
      }
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
