// The stages for one whole block of float values in AVX2, where the machine has it.
#pragma once

#include "passes/cpu/portable_stages.h"
#include "passes/cpu/rows.h"

#if FASTSYNC_HAS_AVX2_ROWS
namespace fastsync::cpu::avx2 {

// Eight of a wire's values, from the i-th of a block on.
template <class W>
FASTSYNC_AVX2_INLINE __m256 load_at(const W* wire, int64_t i) {
  return load(wire + i);
}

FASTSYNC_AVX2_INLINE __m256 load_at(const Int8Block* blocks, int64_t i) {
  const Int8Block& block = blocks[i / kBlockValues];
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(block.values + i % kBlockValues));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), _mm256_set1_ps(block.scale));
}

template <class G>
FASTSYNC_AVX2 void convert(const G* gradient, float* values) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    store(values + i, load(gradient + i));
  }
}

template <class G>
FASTSYNC_AVX2 void subtract(const G* gradient, const G* subtrahend, float* values) {
  for (int64_t i = 0; i < kBlock; i += 8) {
    store(values + i, _mm256_sub_ps(load(gradient + i), load(subtrahend + i)));
  }
}

// Sums stay in registers while all wires are gone through; four make finding the next wire cheap.
template <class W>
FASTSYNC_AVX2 void sum_wires(const Wires& wires, int64_t first, float multiplier, float* sums) {
  constexpr int kVectors = 4;
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const auto* const first_wire = reinterpret_cast<const char*>(wires.at<W>(0, first));
  for (int64_t i = 0; i < kBlock; i += 8 * kVectors) {
    const char* wire = first_wire;
    __m256 totals[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      totals[v] = _mm256_mul_ps(load_at(reinterpret_cast<const W*>(wire), i + 8 * v), multipliers);
    }
    for (int64_t r = 1; r < wires.num; ++r) {
      wire += wires.stride_bytes;
      for (int v = 0; v < kVectors; ++v) {
        const __m256 values = load_at(reinterpret_cast<const W*>(wire), i + 8 * v);
        totals[v] = _mm256_add_ps(totals[v], _mm256_mul_ps(values, multipliers));
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      store(sums + i + 8 * v, totals[v]);
    }
  }
}

FASTSYNC_AVX2 inline void add_residual(const float* residual, float scale, float* values) {
  const __m256 scales = _mm256_set1_ps(scale);
  for (int64_t i = 0; i < kBlock; i += 8) {
    store(values + i, _mm256_add_ps(load(values + i), _mm256_mul_ps(load(residual + i), scales)));
  }
}

// As fastsync::random_fraction, for eight places from the given one on.
FASTSYNC_AVX2_INLINE __m256i random_fractions(uint32_t key, int place) {
  const __m256i places = _mm256_add_epi32(_mm256_set1_epi32(place), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i bits = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int32_t>(key)), places);
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int32_t>(0x85EBCA6BU)));
  bits = _mm256_xor_si256(bits, _mm256_srli_epi32(bits, 13));
  bits = _mm256_mullo_epi32(bits, _mm256_set1_epi32(static_cast<int32_t>(0xC2B2AE35U)));
  return _mm256_srli_epi32(_mm256_xor_si256(bits, _mm256_srli_epi32(bits, 16)), 32 - kFractionBits);
}

// Eight values in units of the scale, of at most 127, to integers.
struct ToNearest {
  FASTSYNC_AVX2_INLINE __m256i operator()(__m256 values, int /*place*/) const { return _mm256_cvtps_epi32(values); }
};

struct Stochastically {
  uint32_t key;

  FASTSYNC_AVX2_INLINE __m256i operator()(__m256 values, int place) const {
    const __m256 scaled = _mm256_mul_ps(values, _mm256_set1_ps(static_cast<float>(kOneFixed)));
    const __m256i capped = _mm256_min_epi32(_mm256_cvtps_epi32(scaled), _mm256_set1_epi32(kLargestFixed));
    const __m256i fixed = _mm256_max_epi32(capped, _mm256_set1_epi32(-kLargestFixed));
    return _mm256_srai_epi32(_mm256_add_epi32(fixed, random_fractions(key, place)), kFractionBits);
  }
};

template <class ToInt>
FASTSYNC_AVX2_INLINE void quantize_block(const float* values, float multiplier, float inverse, const ToInt& to_int,
                                         int8_t* quantized) {
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const __m256 inverses = _mm256_set1_ps(inverse);
  // Packing works in halves of 128 bits; this puts its groups of four bytes back in order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < kBlockValues; i += 32) {
    __m256i eights[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 scaled = _mm256_mul_ps(load(values + i + 8 * j), multipliers);
      eights[j] = to_int(_mm256_mul_ps(scaled, inverses), i + 8 * j);
    }
    const __m256i low = _mm256_packs_epi32(eights[0], eights[1]);
    const __m256i high = _mm256_packs_epi32(eights[2], eights[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(quantized + i), bytes);
  }
}

// False, and nothing written, where a value is beyond the limit or not finite.
FASTSYNC_AVX2 inline bool encode_block(const float* values, const Scaling<float>& scaling, Rounding rounding,
                                       int64_t place, Int8Block& block) {
  const __m256 multipliers = _mm256_set1_ps(scaling.multiplier);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < kBlockValues; i += 8) {
    const __m256 scaled = _mm256_mul_ps(load(values + i), multipliers);
    largest = _mm256_max_epu32(largest, _mm256_castps_si256(magnitudes(scaled)));
  }
  const float amax = float_from_bits(largest_of(largest));
  if (!(amax <= scaling.limit)) {
    return false;
  }
  block.scale = block_scale(amax);
  const float inverse = block_inverse(amax);
  if (rounding.is_stochastic) {
    const Stochastically to_int{block_key(rounding, place / kBlockValues)};
    quantize_block(values, scaling.multiplier, inverse, to_int, block.values);
  } else {
    quantize_block(values, scaling.multiplier, inverse, ToNearest{}, block.values);
  }
  return true;
}

FASTSYNC_AVX2 inline int64_t encode_values(const float* values, const Scaling<float>& scaling, Rounding rounding,
                                           int64_t place, Int8Block* blocks) {
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < kBlock; i += kBlockValues) {
    Int8Block* const block = blocks + i / kBlockValues;
    if (!encode_block(values + i, scaling, rounding, place + i, *block)) {
      num_saturated += portable::encode_values(values + i, kBlockValues, scaling, rounding, place + i, block);
    }
  }
  return num_saturated;
}

template <class W>
FASTSYNC_AVX2 int64_t encode_values(const float* values, const Scaling<float>& scaling, Rounding /*rounding*/,
                                    int64_t /*place*/, W* wire) {
  return pack_rows(values, wire, kBlock, scaling.multiplier, scaling.limit);
}

template <class W>
FASTSYNC_AVX2 void keep_loss(const float* values, const W* encoded, float multiplier, float unit, float* residual) {
  const __m256 multipliers = _mm256_set1_ps(multiplier);
  const __m256 units = _mm256_set1_ps(unit);
  const __m256 largest = _mm256_set1_ps(kLargest<float>);
  const __m256 smallest = _mm256_set1_ps(-kLargest<float>);
  for (int64_t i = 0; i < kBlock; i += 8) {
    const __m256 sent = load_at(encoded, i);
    // A nan as the second operand stays one.
    const __m256 back = _mm256_max_ps(smallest, _mm256_min_ps(largest, _mm256_mul_ps(sent, multipliers)));
    const __m256 lost = _mm256_mul_ps(_mm256_sub_ps(load(values + i), back), units);
    const __m256 is_finite = _mm256_cmp_ps(magnitudes(sent), largest, _CMP_LE_OQ);
    store(residual + i, _mm256_blendv_ps(load(residual + i), lost, is_finite));
  }
}

}  // namespace fastsync::cpu::avx2
#endif
