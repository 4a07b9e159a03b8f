// The wire of int4: blocks of whole numbers from -7 to 7, two a byte, the first of them in its lower half.
#pragma once

#include <cstdint>
#include <cstring>

#include "passes/wire_format.h"

namespace fastsync {

// What a block is, is said at kIsBlock in wire_format.h.
struct Int4Block {
  static constexpr int kBits = 4;
  float scale;
  uint8_t bytes[kBlockValues / 2];

  template <int n>
  FASTSYNC_HOST_DEVICE static void put(const int32_t (&numbers)[n], uint8_t* bytes) {
    for (int i = 0; i < n / 2; ++i) {
      bytes[i] = static_cast<uint8_t>((numbers[2 * i] & 0xF) | (numbers[2 * i + 1] & 0xF) << 4);
    }
  }
  template <int n>
  FASTSYNC_HOST_DEVICE static void get(const uint8_t* bytes, int32_t (&numbers)[n]) {
    for (int i = 0; i < n; ++i) {
      numbers[i] = ((bytes[i / 2] >> (4 * (i % 2)) & 0xF) ^ 8) - 8;  // as two's complement of four bits
    }
  }

#if FASTSYNC_HAS_AVX2
  FASTSYNC_AVX2 static void put_vectors(const __m256i (&numbers)[4], uint8_t* bytes) {
    for (int i = 0; i < 4; ++i) {
      const __m256i values = _mm256_and_si256(numbers[i], _mm256_set1_epi32(0xF));
      const __m256i pairs = _mm256_or_si256(values, _mm256_srli_epi64(values, 28));  // in every other word's low byte
      const __m256i words = _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
      const __m128i low_bytes = _mm_set1_epi32(0x0C080400);
      const int packed = _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm256_castsi256_si128(words), low_bytes));
      std::memcpy(bytes + 4 * i, &packed, sizeof(packed));
    }
  }
  FASTSYNC_AVX2 static __m256i get_vector(const uint8_t* bytes) {
    int32_t word;
    std::memcpy(&word, bytes, sizeof(word));
    const __m256i shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);  // so that each has its value at the top
    return _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(word), shifts), 28);
  }
#endif
};

}  // namespace fastsync
