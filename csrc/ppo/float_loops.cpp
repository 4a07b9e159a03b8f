// Loops that the compiler turns into vector instructions.
#include "ppo/float_loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

// Compiles a function for several generations of x86. When the library is loaded, the system chooses one of them. All
// give the same bits, because -ffp-contract=off forbids fused multiply-adds. ThreadSanitizer is not ready at load time.
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

// A sum begins anew after so many terms, because longer sums are less exact.
constexpr int64_t kTermsOfSum = 256;
// tanh_backward adds up so many columns at a time, whose sums the compiler keeps in registers.
constexpr int64_t kColumns = 64;

// Computes tanh(x) = e / (e + 2) with e = exp(2x) - 1. It splits 2x into a multiple of ln 2, which it subtracts in two
// steps, and a rest. A polynomial gives exp - 1 of the rest. Its coefficients are those of Cephes (S. Moshier, Methods
// and Programs for Mathematical Functions, 1989). For x from 9.1 on, the nearest float is 1. Libraries that promise 1
// unit in the last place take several times as long.
FASTSYNC_INLINE float tanh_of(float x) {
  const float magnitude = std::abs(x);
  const float twice = 2 * (magnitude < 9.1F ? magnitude : 9.1F);
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  const float shifted = twice * 1.44269504F + kRound;
  const float halvings = shifted - kRound;
  const float rest = (twice - halvings * 0.693359375F) + halvings * 2.12194440E-4F;
  float rest_exp = 1.9875691500E-4F;
  rest_exp = rest_exp * rest + 1.3981999507E-3F;
  rest_exp = rest_exp * rest + 8.3334519073E-3F;
  rest_exp = rest_exp * rest + 4.1665795894E-2F;
  rest_exp = rest_exp * rest + 1.6666665459E-1F;
  rest_exp = rest_exp * rest + 5.0000001201E-1F;
  rest_exp = rest_exp * (rest * rest) + rest;
  const auto power = std::bit_cast<float>((std::bit_cast<int32_t>(shifted) + 127) << 23);  // kRound's bits end in zeros
  const float e = rest_exp * power + (power - 1);
  const float result = std::copysign(e / (e + 2), x);
  return x == x ? result : x;
}

typedef float Lanes4 __attribute__((vector_size(16)));
typedef float Lanes8 __attribute__((vector_size(32)));
// The row length of a packed matrix is a multiple of this.
constexpr int64_t kPadding = 8;

// The operands of a product [rows, columns] = start + left [rows, inner] * right [inner, columns]. Each row of right
// is padded to whole vectors.
struct Operands {
  Matrix left, right, start;
  int64_t rows, inner, columns;
};

// Writes one vector of the product: start + sums. Unless kIsWhole, the vector may reach beyond the row's end. Then only
// the part before the end is written.
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

// Computes a tile of the product, whose sums stay in registers while the loop goes over the inner dimension.
template <typename Lanes, int kRows, int kVectors>
FASTSYNC_INLINE void compute_tile(const Operands operands, int64_t row, int64_t column, float* product) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  const float* left_rows[kRows];
  for (int64_t r = 0; r < kRows; ++r) {  // tiles reach beyond the last row, and read it again
    left_rows[r] = operands.left.values + std::min(row + r, operands.rows - 1) * operands.left.row_stride;
  }
  Lanes sums[kRows][kVectors] = {};
  for (int64_t i = 0; i < operands.inner; ++i) {
    Lanes vectors[kVectors];
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      std::memcpy(&vectors[v], operands.right.values + i * operands.right.row_stride + column + v * kLanes,
                  sizeof(Lanes));
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v) {
        sums[r][v] += left_rows[r][i * operands.left.column_stride] * vectors[v];
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < kVectors; ++v) {
      if (row + r < operands.rows) {
        const int64_t at = column + v * kLanes;
        add_lanes<(kVectors > 1)>(operands.start.values + (row + r) * operands.start.row_stride + at, sums[r][v],
                                  operands.columns - at, product + (row + r) * operands.columns + at);
      }
    }
  }
}

// Takes large tiles of 4 rows, and narrow ones for the last columns.
template <typename Lanes, int kVectors>
FASTSYNC_INLINE void compute_tiles(const Operands operands, float* product) {
  constexpr int64_t kLanes = sizeof(Lanes) / sizeof(float);
  int64_t column = 0;
  for (; column + kVectors * kLanes <= operands.columns; column += kVectors * kLanes) {
    for (int64_t row = 0; row < operands.rows; row += 4) {
      compute_tile<Lanes, 4, kVectors>(operands, row, column, product);
    }
  }
  for (; column < operands.columns; column += kLanes) {
    for (int64_t row = 0; row < operands.rows; row += 8) {
      compute_tile<Lanes, 8, 1>(operands, row, column, product);
    }
  }
}

// Chooses tiles that fit the registers of each generation: 32 of 32 bytes, 16 of 32 bytes, and 16 of 16 bytes.
#ifdef FASTSYNC_GENERATIONS
FASTSYNC_FOR("arch=x86-64-v4") void compute(const Operands& operands, float* product) {
  compute_tiles<Lanes8, 4>(operands, product);
}
FASTSYNC_FOR("arch=x86-64-v3") void compute(const Operands& operands, float* product) {
  compute_tiles<Lanes8, 2>(operands, product);
}
#endif
FASTSYNC_FOR("default") void compute(const Operands& operands, float* product) {
  compute_tiles<Lanes4, 2>(operands, product);
}

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
      std::array<float, kColumns> partial_sums{};
      for (int64_t row = begin; row < std::min(begin + kTermsOfSum, rows); ++row) {
        float* __restrict g = grad + row * width + column;
        const float* __restrict y = activated + row * width + column;
        for (int64_t i = 0; i < columns; ++i) {
          g[i] *= 1 - y[i] * y[i];
          partial_sums[i] += g[i];
        }
      }
      for (int64_t i = 0; i < columns; ++i) {
        sums[column + i] += partial_sums[i];
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
    const Matrix left_part{left.values + begin * left.column_stride, left.row_stride, left.column_stride};
    const Matrix right_part{whole.values + begin * whole.row_stride, whole.row_stride, 1};
    compute({left_part, right_part, start, rows, std::min(kTermsOfSum, inner - begin), columns}, product);
    start = {product, columns, 1};
    begin += kTermsOfSum;
  } while (begin < inner);
}

}  // namespace fastsync
