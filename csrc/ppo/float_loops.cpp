// Loops in a form that the compiler turns into vector instructions.
#include "ppo/float_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

// The same loop for several generations of x86, chosen when the library is loaded. Without fused multiply-adds
// (-ffp-contract=off) all give the same bits. ThreadSanitizer is not yet there when that choice is made.
#if defined(__x86_64__) && !defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__)
#define FASTSYNC_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTSYNC_WIDE
#endif

namespace fastsync {
namespace {

// Sums begin anew after so many, for they grow less exact with their length.
constexpr int64_t kTermsOfSum = 256;
// Sums that the compiler keeps in registers.
constexpr int64_t kColumns = 64;

// tanh; libraries that promise 1 unit in the last place take several times as long. Up to 0.625 an odd polynomial,
// beyond it 1 - 2 / (exp(2x) + 1), as in Cephes (S. Moshier, Methods and Programs for Mathematical Functions, 1989),
// whose coefficients the two polynomials have; exp by halving the range with ln 2 in two parts. At 9.1 and beyond the
// nearest float is 1.
inline __attribute__((always_inline)) float tanh_of(float x) {
  const float magnitude = std::abs(x);

  const float square = x * x;
  float odd = -5.70498872745E-3F;
  odd = odd * square + 2.06390887954E-2F;
  odd = odd * square - 5.37397155531E-2F;
  odd = odd * square + 1.33314422036E-1F;
  odd = odd * square - 3.33332819422E-1F;
  const float near_zero = magnitude + magnitude * square * odd;

  const float twice = 2 * (magnitude < 9.1F ? magnitude : 9.1F);
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const float halvings = (twice * 1.44269504F + kRound) - kRound;
  const float rest = (twice - halvings * 0.693359375F) + halvings * 2.12194440E-4F;
  float exponential = 1.9875691500E-4F;
  exponential = exponential * rest + 1.3981999507E-3F;
  exponential = exponential * rest + 8.3334519073E-3F;
  exponential = exponential * rest + 4.1665795894E-2F;
  exponential = exponential * rest + 1.6666665459E-1F;
  exponential = exponential * rest + 5.0000001201E-1F;
  exponential = exponential * rest * rest + rest + 1;
  const auto power = std::bit_cast<float>((static_cast<int32_t>(halvings) + 127) << 23);
  const float far = 1 - 2 / (exponential * power + 1);

  const float result = std::copysign(magnitude < 0.625F ? near_zero : far, x);
  return x == x ? result : x;
}

typedef float Lanes __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;
constexpr int64_t kTileRows = 4;

// Adds left [rows, inner] * right [inner, columns] to the product. Each row of right has room for whole vectors. The
// sums of a tile stay in registers while the two matrices pass by.
FASTSYNC_WIDE void add_product(const Matrix& left, const float* right, int64_t right_stride, int64_t rows,
                               int64_t inner, int64_t columns, float* product) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const float* of_left[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) {  // beyond the last row, that one again
        of_left[r] = left.values + std::min(row + r, rows - 1) * left.row_stride;
      }
      Lanes sums[kTileRows] = {};
      for (int64_t i = 0; i < inner; ++i) {
        Lanes vector;
        std::memcpy(&vector, right + i * right_stride + column, sizeof(vector));
#pragma GCC unroll 4
        for (int64_t r = 0; r < kTileRows; ++r) {
          sums[r] += of_left[r][i * left.column_stride] * vector;
        }
      }
      std::array<float, kTileRows * kLanes> tile;
      std::memcpy(tile.data(), sums, sizeof(sums));
      for (int64_t r = 0; r < std::min(kTileRows, rows - row); ++r) {
        for (int64_t c = 0; c < std::min(kLanes, columns - column); ++c) {
          product[(row + r) * columns + column + c] += tile[r * kLanes + c];
        }
      }
    }
  }
}

}  // namespace

FASTSYNC_WIDE void fast_tanh(float* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = tanh_of(values[i]);
  }
}

FASTSYNC_WIDE void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums) {
  std::fill_n(sums, width, 0.0F);
  for (int64_t column = 0; column < width; column += kColumns) {
    const int64_t columns = std::min(kColumns, width - column);
    for (int64_t begin = 0; begin < rows; begin += kTermsOfSum) {
      std::array<float, kColumns> part{};
      for (int64_t row = begin; row < std::min(begin + kTermsOfSum, rows); ++row) {
        float* __restrict g = grad + row * width + column;
        const float* __restrict y = activated + row * width + column;
        for (int64_t i = 0; i < columns; ++i) {
          g[i] *= 1 - y[i] * y[i];
          part[i] += g[i];
        }
      }
      for (int64_t i = 0; i < columns; ++i) {
        sums[column + i] += part[i];
      }
    }
  }
}

void matmul(const Matrix& left, const Matrix& right, const float* addend, int64_t rows, int64_t inner, int64_t columns,
            float* product) {
  for (int64_t row = 0; row < rows; ++row) {
    if (addend == nullptr) {
      std::fill_n(product + row * columns, columns, 0.0F);
    } else {
      std::copy_n(addend, columns, product + row * columns);
    }
  }
  std::vector<float> packed;
  const float* values = right.values;
  int64_t stride = right.row_stride;
  if (right.column_stride != 1 || columns % kLanes != 0) {
    stride = (columns + kLanes - 1) / kLanes * kLanes;
    packed.resize(static_cast<size_t>(inner * stride));
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t i = 0; i < inner; ++i) {
        packed[i * stride + column] = right.values[i * right.row_stride + column * right.column_stride];
      }
    }
    values = packed.data();
  }
  for (int64_t begin = 0; begin < inner; begin += kTermsOfSum) {
    const Matrix part{left.values + begin * left.column_stride, left.row_stride, left.column_stride};
    add_product(part, values + begin * stride, stride, rows, std::min(kTermsOfSum, inner - begin), columns, product);
  }
}

}  // namespace fastsync
