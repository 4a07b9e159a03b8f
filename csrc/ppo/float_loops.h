// Loops for small layers in single precision. They run on one thread, and give the same bits on every CPU. Libraries
// take two to three times as long.
#pragma once

#include <cstdint>

namespace fastsync {

// Replaces each value by its tanh, within 2.5 units in the last place of the exact value (tests/ppo/test_ops.py).
void fast_tanh(float* values, int64_t numel);

// Turns the gradient [rows, width] of activated = tanh(x) into the gradient of x, in place. Adds the sum of that over
// the rows to sums [width].
void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums);

// A matrix in memory. Strides are the distances between its rows and between its columns.
struct Matrix {
  const float* values;
  int64_t row_stride;
  int64_t column_stride;
};

// Computes product [rows, columns] = start + left [rows, inner] * right [inner, columns]. The product's rows are
// contiguous. start may be the product itself, or null for 0.
void matmul(const Matrix& left, const Matrix& right, Matrix start, int64_t rows, int64_t inner, int64_t columns,
            float* product);

}  // namespace fastsync
