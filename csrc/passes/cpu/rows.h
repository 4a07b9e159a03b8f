// Rows of sixteen values: the inner step of the CPU's passes, in AVX2 where the machine has it and in plain C++ else.
// Both give the same bits. The vector rows hand a row with a value out of the ordinary back to wire_format.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "passes/wire_format.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FASTSYNC_HAS_AVX2_ROWS 1
#define FASTSYNC_AVX2 __attribute__((target("avx2,f16c")))
#define FASTSYNC_AVX2_INLINE __attribute__((target("avx2,f16c"), always_inline)) inline
#else
#define FASTSYNC_HAS_AVX2_ROWS 0
#endif

namespace fastsync::cpu {

constexpr int kRow = 16;
constexpr int kRowsPerBlock = 16;
constexpr int64_t kBlock = kRow * kRowsPerBlock;

// Squares of a block, summed per column in float, and its largest magnitude as bits (ordered like the magnitudes, inf
// and nan above all). The caller widens to double; see Tally.
struct BlockSquares {
  float columns[kRow];
  uint32_t largest_bits;
};

template <class W, class G>
inline W pack_value(G gradient, Compute<G> multiplier, Compute<G> limit, int64_t& num_saturated) {
  bool saturated;
  const Compute<G> scaled = scale_and_clamp<Compute<G>>(decode(gradient), multiplier, limit, saturated);
  num_saturated += saturated;
  return encode<W>(static_cast<Compute<W>>(scaled));
}

// From a 16-bit wire or a sum to float, a row need not look for values beyond float's largest: what becomes inf shows
// in the block's largest magnitude, and as the wire is still there the block can be done again.
template <class W, class G>
inline constexpr bool kMayHoldBeyond = std::is_same_v<G, float> && !std::is_same_v<W, float>;

// A sum over several wires, kept until its gradient is written.
struct Sum {
  float value;
};
inline float decode(Sum sum) { return sum.value; }
using fastsync::decode;

namespace portable {

template <class G, class W>
int64_t pack_rows(const G* gradient, W* wire, int64_t numel, Compute<G> multiplier, Compute<G> limit) {
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < numel; ++i) {
    wire[i] = pack_value<W>(gradient[i], multiplier, limit, num_saturated);
  }
  return num_saturated;
}

inline void add_row(const float* row, BlockSquares& squares) {
  for (int j = 0; j < kRow; ++j) {
    squares.columns[j] += row[j] * row[j];
    const uint32_t bits = float_bits(row[j]) & 0x7FFFFFFFU;
    squares.largest_bits = bits > squares.largest_bits ? bits : squares.largest_bits;
  }
}

template <class W, class G>
void unpack_block(const W* wire, G* gradient, float multiplier, BlockSquares& squares) {
  for (int64_t i = 0; i < kBlock; i += kRow) {
    float row[kRow];
    for (int j = 0; j < kRow; ++j) {
      gradient[i + j] = decode_to<G>(wire[i + j], multiplier);
      row[j] = decode(gradient[i + j]);
    }
    add_row(row, squares);
  }
}

template <class G>
void measure_block(const G* gradient, BlockSquares& squares) {
  for (int64_t i = 0; i < kBlock; i += kRow) {
    float row[kRow];
    for (int j = 0; j < kRow; ++j) {
      row[j] = decode(gradient[i + j]);
    }
    add_row(row, squares);
  }
}

}  // namespace portable

#if FASTSYNC_HAS_AVX2_ROWS
namespace avx2 {

FASTSYNC_AVX2_INLINE __m256 load(const float* p) { return _mm256_loadu_ps(p); }

FASTSYNC_AVX2_INLINE __m256 load(const Sum* p) { return load(&p->value); }

FASTSYNC_AVX2_INLINE __m128i load_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

FASTSYNC_AVX2_INLINE __m256 load(const Float16* p) { return _mm256_cvtph_ps(load_bits(p)); }

FASTSYNC_AVX2_INLINE __m256 load(const BFloat16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bits(p)), 16));
}

FASTSYNC_AVX2_INLINE void store_bits(void* p, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(p), bits); }

FASTSYNC_AVX2_INLINE void store(float* p, __m256 v) { _mm256_storeu_ps(p, v); }

FASTSYNC_AVX2_INLINE void store(Float16* p, __m256 v) { store_bits(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

FASTSYNC_AVX2_INLINE void store(BFloat16* p, __m256 v) {  // no nan comes here
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  store_bits(p, _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}

FASTSYNC_AVX2_INLINE __m256 magnitudes(__m256 v) {
  return _mm256_and_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)));
}

// True if a magnitude of the row is above the limit, or a nan.
FASTSYNC_AVX2_INLINE bool any_beyond(__m256 low, __m256 high, __m256 limit) {
  const __m256 beyond = _mm256_or_ps(_mm256_cmp_ps(magnitudes(low), limit, _CMP_NLE_UQ),
                                     _mm256_cmp_ps(magnitudes(high), limit, _CMP_NLE_UQ));
  return !_mm256_testz_ps(beyond, beyond);
}

template <class G, class W>
FASTSYNC_AVX2 int64_t pack_rows(const G* gradient, W* wire, int64_t numel, float multiplier, float limit) {
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const __m256 limits = _mm256_set1_ps(limit);
  int64_t num_saturated = 0;
  int64_t i = 0;
  for (; i + kRow <= numel; i += kRow) {
    const __m256 low = _mm256_mul_ps(load(gradient + i), multipliers);
    const __m256 high = _mm256_mul_ps(load(gradient + i + 8), multipliers);
    if (__builtin_expect(any_beyond(low, high, limits), 0)) {
      num_saturated += portable::pack_rows(gradient + i, wire + i, kRow, multiplier, limit);
    } else {
      store(wire + i, low);
      store(wire + i + 8, high);
    }
  }
  return num_saturated + portable::pack_rows(gradient + i, wire + i, numel - i, multiplier, limit);
}

struct Columns {
  __m256 low, high;
  __m256i largest;
};

FASTSYNC_AVX2_INLINE void add_row(__m256 low, __m256 high, Columns& columns) {
  columns.low = _mm256_add_ps(columns.low, _mm256_mul_ps(low, low));
  columns.high = _mm256_add_ps(columns.high, _mm256_mul_ps(high, high));
  const __m256i larger = _mm256_max_epu32(_mm256_castps_si256(magnitudes(low)), _mm256_castps_si256(magnitudes(high)));
  columns.largest = _mm256_max_epu32(columns.largest, larger);
}

FASTSYNC_AVX2_INLINE Columns no_columns() { return {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_si256()}; }

FASTSYNC_AVX2_INLINE uint32_t largest_of(__m256i values) {
  const __m256i four = _mm256_max_epu32(values, _mm256_permute2x128_si256(values, values, 1));
  const __m256i two = _mm256_max_epu32(four, _mm256_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
  const __m256i one = _mm256_max_epu32(two, _mm256_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1)));
  return static_cast<uint32_t>(_mm256_cvtsi256_si32(one));
}

FASTSYNC_AVX2_INLINE void write_out(const Columns& columns, BlockSquares& squares) {
  _mm256_storeu_ps(squares.columns, columns.low);
  _mm256_storeu_ps(squares.columns + 8, columns.high);
  squares.largest_bits = largest_of(columns.largest);
}

template <class W, class G>
FASTSYNC_AVX2 void unpack_block(const W* wire, G* gradient, float multiplier, BlockSquares& squares) {
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const __m256 limits = _mm256_set1_ps(kLargest<G>);
  Columns columns = no_columns();
  for (int64_t i = 0; i < kBlock; i += kRow) {
    __m256 low = _mm256_mul_ps(load(wire + i), multipliers);
    __m256 high = _mm256_mul_ps(load(wire + i + 8), multipliers);
    if constexpr (kMayHoldBeyond<W, G>) {
      store(gradient + i, low);
      store(gradient + i + 8, high);
    } else if (__builtin_expect(any_beyond(low, high, limits), 0)) {
      for (int j = 0; j < kRow; ++j) {
        gradient[i + j] = decode_to<G>(wire[i + j], multiplier);
      }
      low = load(gradient + i);
      high = load(gradient + i + 8);
    } else {
      store(gradient + i, low);
      store(gradient + i + 8, high);
      if constexpr (!std::is_same_v<G, float>) {  // the statistics are of what was stored
        low = load(gradient + i);
        high = load(gradient + i + 8);
      }
    }
    add_row(low, high, columns);
  }
  write_out(columns, squares);
}

template <class G>
FASTSYNC_AVX2 void measure_block(const G* gradient, BlockSquares& squares) {
  Columns columns = no_columns();
  for (int64_t i = 0; i < kBlock; i += kRow) {
    add_row(load(gradient + i), load(gradient + i + 8), columns);
  }
  write_out(columns, squares);
}

}  // namespace avx2
#endif

}  // namespace fastsync::cpu
