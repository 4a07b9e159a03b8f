// Loads and stores vectors of 32 bytes, for each type.
//
// Note [Vectors without intrinsics]
//   Arithmetic is written in vectors of 32 bytes. GCC and clang lower these to what the target has: one AVX2 register,
//   or two registers of SSE2 or NEON. The namespaces any and avx2 give the same bits, because each lane is rounded as a
//   single value is. Only conversions from and to 16 bits use intrinsics, all in this file.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "passes/cpu/tiles.h"

#if FASTSYNC_AVX2_LOOPS
#include <immintrin.h>
#endif

#include "passes/cpu/push_target.h"

namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS {
namespace {

template <class T, int bytes = 32>
struct VectorOf {
  typedef T type __attribute__((vector_size(bytes)));
};
template <class C>
using Vec = typename VectorOf<C>::type;
template <class C>
using Bits = Vec<std::conditional_t<std::is_same_v<C, double>, int64_t, int32_t>>;
template <class C>
inline constexpr int kLanes = 32 / sizeof(C);

template <class V>
FASTSYNC_INLINE V load_raw(const void* p) {
  V vector;
  std::memcpy(&vector, p, sizeof(V));
  return vector;
}
template <class V>
FASTSYNC_INLINE void store_raw(void* p, V vector) {
  std::memcpy(p, &vector, sizeof(V));
}

template <class C, class T>
FASTSYNC_INLINE Vec<C> load(const T* p) {
  if constexpr (std::is_same_v<C, T>) {
    return load_raw<Vec<C>>(p);
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, BFloat16>) {
#if FASTSYNC_AVX2_LOOPS
    const auto halves = reinterpret_cast<Bits<float>>(_mm256_cvtepu16_epi32(load_raw<__m128i>(p)));
#else
    const auto halves = __builtin_convertvector(load_raw<VectorOf<uint16_t, 16>::type>(p), Bits<float>);
#endif
    return reinterpret_cast<Vec<float>>(halves << 16);
#if FASTSYNC_AVX2_LOOPS
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, Half>) {
    return reinterpret_cast<Vec<float>>(_mm256_cvtph_ps(load_raw<__m128i>(p)));
#endif
  } else {
    Vec<C> vector;
    for (int lane = 0; lane < kLanes<C>; ++lane) {
      vector[lane] = static_cast<C>(decode(p[lane]));
    }
    return vector;
  }
}

// Rounds to nearest even, and stores. It may turn a nan into another value.
template <class T, class C>
FASTSYNC_INLINE void store(T* p, Vec<C> vector) {
  if constexpr (std::is_same_v<C, T>) {
    store_raw(p, vector);
#if FASTSYNC_AVX2_LOOPS
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, Half>) {
    const __m128i halves = _mm256_cvtps_ph(reinterpret_cast<__m256>(vector), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);  // converting into memory is slower
#endif
  } else if constexpr (std::is_same_v<C, float> && std::is_same_v<T, BFloat16>) {
    const auto bits = reinterpret_cast<Vec<uint32_t>>(vector);
    const Vec<uint32_t> high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
#if FASTSYNC_AVX2_LOOPS
    const auto halves = reinterpret_cast<__m256i>(high);
    store_raw(p, _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    store_raw(p, __builtin_convertvector(high, VectorOf<uint16_t, 16>::type));
#endif
  } else {
    for (int lane = 0; lane < kLanes<C>; ++lane) {
      p[lane] = encode<T>(static_cast<Compute<T>>(vector[lane]));
    }
  }
}

template <class C>
FASTSYNC_INLINE Vec<C> magnitudes(Vec<C> v) {
  return reinterpret_cast<Vec<C>>(reinterpret_cast<Bits<C>>(v) & std::numeric_limits<decltype(+Bits<C>{}[0])>::max());
}

// Returns the larger magnitude in each lane, as bits. Bits are ordered as magnitudes are, with inf and nan at the top.
template <class C>
FASTSYNC_INLINE Bits<C> larger(Bits<C> largest, Vec<C> values) {
  const auto seen = reinterpret_cast<Bits<C>>(magnitudes<C>(values));
  return largest > seen ? largest : seen;
}
FASTSYNC_INLINE Bits<float> max_of(Bits<float> x, Bits<float> y) { return x > y ? x : y; }
FASTSYNC_INLINE float largest_of(Bits<float> b) {
  b = max_of(b, Bits<float>{b[4], b[5], b[6], b[7], b[0], b[1], b[2], b[3]});  // g++ 11 has no __builtin_shufflevector
  b = max_of(b, Bits<float>{b[2], b[3], b[0], b[1], b[6], b[7], b[4], b[5]});
  return std::bit_cast<float>(max_of(b, Bits<float>{b[1], b[0], b[3], b[2], b[5], b[4], b[7], b[6]})[0]);
}
FASTSYNC_INLINE double largest_of(Bits<double> b) {
  return std::bit_cast<double>(std::max(std::max<int64_t>(b[0], b[1]), std::max<int64_t>(b[2], b[3])));
}

}  // namespace
}  // namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS

#include "passes/cpu/pop_target.h"
