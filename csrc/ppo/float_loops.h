// Small layers in single precision, which a library takes two to three times as long for: loops on one thread, bitwise
// the same on every CPU.
#pragma once

#include <cstdint>

namespace fastsync {

// values → tanh(values), in place: within 2.5 units in the last place of the exact value (tests/ppo/test_ops.py).
void fast_tanh(float* values, int64_t numel);

// The gradient [rows, width] of activated = tanh(x) → that of x, in place. Its sum over rows is added to sums [width].
void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums);

// A matrix as it lies in memory: the distance of its rows, and of its columns.
struct Matrix {
  const float* values;
  int64_t row_stride;
  int64_t column_stride;
};

// product [rows, columns], each row right behind the other: start + left [rows, inner] * right [inner, columns]. start
// may be the product itself, or null for 0.
void matmul(const Matrix& left, const Matrix& right, Matrix start, int64_t rows, int64_t inner, int64_t columns,
            float* product);

}  // namespace fastsync
