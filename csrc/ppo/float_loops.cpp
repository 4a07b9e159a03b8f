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
#define FASTSYNC_GENERATIONS
#define FASTSYNC_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FASTSYNC_FOR(generation) __attribute__((target(generation)))
#else
#define FASTSYNC_WIDE
#define FASTSYNC_FOR(generation)
#endif
#define FASTSYNC_INLINE inline __attribute__((always_inline))

namespace fastsync {
namespace {

// Sums begin anew after so many, for they grow less exact with their length.
constexpr int64_t kTermsOfSum = 256;
// Sums that the compiler keeps in registers.
constexpr int64_t kColumns = 64;

// tanh(x) = e / (e + 2) with e = exp(2x) - 1. Libraries that promise 1 unit in the last place take several times as
// long. 2x is a multiple of ln 2, which is subtracted in two parts, and a rest, for which a polynomial gives exp - 1
// (its coefficients are those of Cephes: S. Moshier, Methods and Programs for Mathematical Functions, 1989). At 9.1 and
// beyond the nearest float is 1.
FASTSYNC_INLINE float tanh_of(float x) {
  const float magnitude = std::abs(x);
  const float twice = 2 * (magnitude < 9.1F ? magnitude : 9.1F);
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const float shifted = twice * 1.44269504F + kRound;
  const float halvings = shifted - kRound;
  const float rest = (twice - halvings * 0.693359375F) + halvings * 2.12194440E-4F;
  float of_rest = 1.9875691500E-4F;
  of_rest = of_rest * rest + 1.3981999507E-3F;
  of_rest = of_rest * rest + 8.3334519073E-3F;
  of_rest = of_rest * rest + 4.1665795894E-2F;
  of_rest = of_rest * rest + 1.6666665459E-1F;
  of_rest = of_rest * rest + 5.0000001201E-1F;
  of_rest = of_rest * (rest * rest) + rest;
  const auto power = std::bit_cast<float>((std::bit_cast<int32_t>(shifted) + 127) << 23);  // kRound's bits end in zeros
  const float e = of_rest * power + (power - 1);
  const float result = std::copysign(e / (e + 2), x);
  return x == x ? result : x;
}

typedef float Lanes4 __attribute__((vector_size(16)));
typedef float Lanes8 __attribute__((vector_size(32)));
// Rows of packed matrices have room for so many columns more.
constexpr int64_t kPadding = 8;

// The operands of a product [rows, columns] = start + left [rows, inner] * right [inner, columns]. Each row of right
// has room for whole vectors.
struct Operands {
  Matrix left, right, start;
  int64_t rows, inner, columns;
};

// One vector of the product: start + sums. Unless it is whole, it may be wider than what is left of the row.
template <bool kIsWhole, typename Lanes>
FASTSYNC_INLINE void add_lanes(const float* start, Lanes sums, int64_t columns, float* product) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  if (kIsWhole || columns >= kLanes) {
    Lanes first;
    std::memcpy(&first, start, sizeof(first));
    first += sums;
    std::memcpy(product, &first, sizeof(first));
    return;
  }
  for (int64_t i = 0; i < columns; ++i) {
    product[i] = start[i] + sums[i];
  }
}

// A tile of the product, whose sums stay in registers while the two matrices pass by.
template <typename Lanes, int kRows, int kVectors>
FASTSYNC_INLINE void compute_tile(const Operands of, int64_t row, int64_t column, float* product) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  const float* of_left[kRows];
  for (int64_t r = 0; r < kRows; ++r) {  // beyond the last row, that one again
    of_left[r] = of.left.values + std::min(row + r, of.rows - 1) * of.left.row_stride;
  }
  Lanes sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < of.inner; ++i) {
    Lanes vectors[kVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      std::memcpy(&vectors[v], of.right.values + i * of.right.row_stride + column + v * kLanes, sizeof(Lanes));
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] += of_left[r][i * of.left.column_stride] * vectors[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      if (row + r < of.rows) {
        const int64_t at = column + v * kLanes;
        add_lanes<(kVectors > 1)>(of.start.values + (row + r) * of.start.row_stride + at, sums[r][v], of.columns - at,
                                  product + (row + r) * of.columns + at);
      }
    }
  }
}

// Large tiles of 4 rows, and narrow ones for the last columns.
template <typename Lanes, int kVectors>
FASTSYNC_INLINE void compute_tiles(const Operands of, float* product) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  int64_t column = 0;
  for (; column + kVectors * kLanes <= of.columns; column += kVectors * kLanes) {
    for (int64_t row = 0; row < of.rows; row += 4) {
      compute_tile<Lanes, 4, kVectors>(of, row, column, product);
    }
  }
  for (; column < of.columns; column += kLanes) {
    for (int64_t row = 0; row < of.rows; row += 8) {
      compute_tile<Lanes, 8, 1>(of, row, column, product);
    }
  }
}

// Tiles for the registers of each generation: 32 of 32 bytes, 16 of 32, and 16 of 16.
#ifdef FASTSYNC_GENERATIONS
FASTSYNC_FOR("arch=x86-64-v4") void compute(const Operands& of, float* product) {
  compute_tiles<Lanes8, 4>(of, product);
}
FASTSYNC_FOR("arch=x86-64-v3") void compute(const Operands& of, float* product) {
  compute_tiles<Lanes8, 2>(of, product);
}
#endif
FASTSYNC_FOR("default") void compute(const Operands& of, float* product) { compute_tiles<Lanes4, 2>(of, product); }

}  // namespace

FASTSYNC_WIDE void fast_tanh(float* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = tanh_of(values[i]);
  }
}

FASTSYNC_WIDE void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums) {
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

void matmul(const Matrix& left, const Matrix& right, Matrix start, int64_t rows, int64_t inner, int64_t columns,
            float* product) {
  std::vector<float> packed;
  Matrix whole = right;
  if (right.column_stride != 1 || columns % kPadding != 0) {
    const int64_t stride = (columns + kPadding - 1) / kPadding * kPadding;
    packed.resize(static_cast<size_t>(inner * stride));
    for (int64_t column = 0; column < columns; ++column) {
      for (int64_t i = 0; i < inner; ++i) {
        packed[i * stride + column] = right.values[i * right.row_stride + column * right.column_stride];
      }
    }
    whole = {packed.data(), stride, 1};
  }
  const std::vector<float> zeros(start.values == nullptr ? columns : 0);
  if (start.values == nullptr) {
    start = {zeros.data(), 0, 1};
  }
  int64_t begin = 0;
  do {
    const Matrix of_left{left.values + begin * left.column_stride, left.row_stride, left.column_stride};
    const Matrix of_right{whole.values + begin * whole.row_stride, whole.row_stride, 1};
    compute({of_left, of_right, start, rows, std::min(kTermsOfSum, inner - begin), columns}, product);
    start = {product, columns, 1};
    begin += kTermsOfSum;
  } while (begin < inner);
}

}  // namespace fastsync
