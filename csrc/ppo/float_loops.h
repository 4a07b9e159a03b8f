// Small layers in single precision, which a library takes two to three times as long for: loops on one thread, bitwise
// the same on every CPU.
#pragma once

#include <cstdint>

namespace fastsync {

// values → tanh(values), in place: within 2.5 units in the last place of the exact value (tests/ppo/test_ops.py).
void fast_tanh(float* values, int64_t numel);

// The gradient [rows, width] of activated = tanh(x) → that of x, in place, and into sums [width] its sum over rows.
void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums);

// A matrix as it lies in memory: the distance of its rows, and of its columns.
struct Matrix {
  const float* values;
  int64_t row_stride;
  int64_t column_stride;
};

// product [rows, columns], each row right behind the other: left [rows, inner] * right [inner, columns], plus addend
// [columns] in each row if there is one.
void matmul(const Matrix& left, const Matrix& right, const float* addend, int64_t rows, int64_t inner, int64_t columns,
            float* product);

}  // namespace fastsync
