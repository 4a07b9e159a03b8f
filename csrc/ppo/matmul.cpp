// Tiles of the product stay in registers while the two matrices pass by. Small matrices lie in a cache as they are, so
// nothing is packed or cut into blocks for one.
#include "ppo/matmul.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include <algorithm>
#define FASTSYNC_AVX512 __attribute__((target("avx512f")))
#endif

namespace fastsync {

void transpose(const float* values, int64_t rows, int64_t columns, float* transposed) {
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      transposed[column * rows + row] = values[row * columns + column];
    }
  }
}

#if defined(FASTSYNC_AVX512)
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileRows = 4;
constexpr int64_t kTileVectors = 4;
// Sums begin anew after so many, for they grow less exact with their length, and what passes by stays in a cache.
constexpr int64_t kInner = 256;

// The lanes of a vector that begins at `column` of `columns`.
inline __mmask16 lanes_of(int64_t column, int64_t columns) {
  const int64_t lanes = std::clamp<int64_t>(columns - column, 0, kLanes);
  return static_cast<__mmask16>((1U << static_cast<unsigned>(lanes)) - 1U);
}

// Adds left [kRows, inner] * right [inner, columns], up to kVectors * kLanes of them, to what `product` begins with.
template <int kRows, int kVectors>
FASTSYNC_AVX512 inline __attribute__((always_inline)) void add_tile(const Matrix& left, const Matrix& right,
                                                                    int64_t inner, int64_t columns, float* product,
                                                                    int64_t row_stride) {
  __m512 sums[kRows][kVectors];
  __mmask16 lanes[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    lanes[v] = lanes_of(v * kLanes, columns);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      sums[r][v] = _mm512_setzero_ps();
    }
  }
  for (int64_t i = 0; i < inner; ++i) {
    const float* of_right = right.values + i * right.row_stride;
    const float* of_left = left.values + i * left.column_stride;
    __m512 vectors[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = _mm512_maskz_loadu_ps(lanes[v], of_right + v * kLanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512 factor = _mm512_set1_ps(of_left[r * left.row_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = _mm512_fmadd_ps(factor, vectors[v], sums[r][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* place = product + r * row_stride + v * kLanes;
      const __m512 before = _mm512_maskz_loadu_ps(lanes[v], place);
      _mm512_mask_storeu_ps(place, lanes[v], _mm512_add_ps(before, sums[r][v]));
    }
  }
}

template <int kVectors>
FASTSYNC_AVX512 void add_columns(Matrix left, const Matrix& right, int64_t rows, int64_t inner, int64_t columns,
                                 float* product, int64_t row_stride) {
  for (; rows >= kTileRows; rows -= kTileRows) {
    add_tile<kTileRows, kVectors>(left, right, inner, columns, product, row_stride);
    left.values += kTileRows * left.row_stride;
    product += kTileRows * row_stride;
  }
  for (; rows > 0; --rows) {
    add_tile<1, kVectors>(left, right, inner, columns, product, row_stride);
    left.values += left.row_stride;
    product += row_stride;
  }
}

}  // namespace

bool has_matmul() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0;
  return has;
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
  constexpr int64_t kTileColumns = kTileVectors * kLanes;
  for (int64_t begin = 0; begin < inner; begin += kInner) {
    const int64_t part = std::min(kInner, inner - begin);
    const Matrix of_left{left.values + begin * left.column_stride, left.row_stride, left.column_stride};
    for (int64_t column = 0; column < columns; column += kTileColumns) {
      const Matrix of_right{right.values + begin * right.row_stride + column, right.row_stride, 1};
      const int64_t width = std::min(kTileColumns, columns - column);
      const auto add = width <= kLanes ? add_columns<1> : width <= 2 * kLanes ? add_columns<2> : add_columns<4>;
      add(of_left, of_right, rows, part, width, product + column, columns);
    }
  }
}

#else

bool has_matmul() { return false; }

void matmul(const Matrix&, const Matrix&, const float*, int64_t, int64_t, int64_t, float*) {}

#endif

}  // namespace fastsync
