// Products of small matrices in single precision, with AVX-512: where a library takes two to three times as long.
#pragma once

#include <cstdint>

namespace fastsync {

// Whether this CPU has what matmul needs.
bool has_matmul();

// A matrix as it lies in memory: the distance of its rows, and of its columns.
struct Matrix {
  const float* values;
  int64_t row_stride;
  int64_t column_stride;
};

// product [rows, columns], each row right behind the other, from left [rows, inner] and right [inner, columns], whose
// columns lie side by side: left * right, plus addend [columns] in each row if there is one. On one thread.
void matmul(const Matrix& left, const Matrix& right, const float* addend, int64_t rows, int64_t inner, int64_t columns,
            float* product);

// The same matrix [rows, columns], its columns side by side, with the other way round in memory: [columns, rows].
void transpose(const float* values, int64_t rows, int64_t columns, float* transposed);

}  // namespace fastsync
