// The wire of int8: blocks of whole numbers from -127 to 127, a byte each.
#pragma once

#include <cstdint>
#include <cstring>

#include "passes/wire_format.h"

namespace fastsync {

// What a block is, is said at kIsBlock in wire_format.h.
struct Int8Block {
  static constexpr int kBits = 8;
  float scale;
  uint8_t bytes[kBlockValues];

  template <int n>
  FASTSYNC_HOST_DEVICE static void put(const int32_t (&numbers)[n], uint8_t* bytes) {
    for (int i = 0; i < n; ++i) {
      bytes[i] = static_cast<uint8_t>(numbers[i]);
    }
  }
  template <int n>
  FASTSYNC_HOST_DEVICE static void get(const uint8_t* bytes, int32_t (&numbers)[n]) {
    for (int i = 0; i < n; ++i) {
      numbers[i] = static_cast<int8_t>(bytes[i]);
    }
  }

#if FASTSYNC_HAS_AVX2  // GCC 12 would go byte by byte
  FASTSYNC_AVX2 static void put_vectors(const __m256i (&numbers)[4], uint8_t* bytes) {
    const __m256i low = _mm256_packs_epi32(numbers[0], numbers[1]);
    const __m256i high = _mm256_packs_epi32(numbers[2], numbers[3]);
    // Packing works in halves of 128 bits; this puts its groups of four bytes back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    std::memcpy(bytes, &packed, sizeof(packed));
  }
  FASTSYNC_AVX2 static __m256i get_vector(const uint8_t* bytes) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  }
#endif
};

}  // namespace fastsync
