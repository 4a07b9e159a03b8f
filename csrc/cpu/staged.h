// The stages of a pass that does more than convert: values are gathered into a block that stays in the first-level
// cache, encoded from there, and what the encoding lost is kept. Plain C++, which gives the bits for all others.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "../pack_unpack.h"
#include "rows.h"

namespace fastsync::cpu {

// Several ranks' wires, of which each holds the same elements.
struct Wires {
  const void* first;
  int64_t num;
  int64_t stride_bytes;

  template <class W>
  const W* at(int64_t wire, int64_t index) const {
    return element_of<W>(static_cast<const char*>(first) + wire * stride_bytes, index);
  }
};

// What is done to a value before it is encoded.
template <class C>
struct Scaling {
  C multiplier;
  C limit;
};

namespace portable {

// sums[i] = sum over the wires of element first + i, times the multiplier.
template <class W, class C>
inline __attribute__((always_inline)) void sum_wires(const Wires& wires, int64_t first, int64_t numel, C multiplier,
                                                     C* sums) {
  for (int64_t r = 0; r < wires.num; ++r) {
    const W* wire = wires.at<W>(r, first);
    for (int64_t i = 0; i < numel; ++i) {
      C value;
      if constexpr (std::is_same_v<W, Int8Block>) {
        const Int8Block& block = wire[i / kBlockValues];
        value = static_cast<C>(decode(block.values[i % kBlockValues], block.scale));
      } else {
        value = static_cast<C>(decode(wire[i]));
      }
      sums[i] = r == 0 ? value * multiplier : sums[i] + value * multiplier;
    }
  }
}

// Encodes a block from what is in it, zeros after the first numel.
inline void encode_block(const float* values, int64_t numel, Rounding rounding, int64_t place, Int8Block& block) {
  uint32_t largest_bits = 0;
  for (int64_t i = 0; i < numel; ++i) {
    largest_bits = std::max(largest_bits, float_bits(magnitude(values[i])) & 0x7FFFFFFFU);
  }
  std::fill_n(block.values, kBlockValues, int8_t{0});
  if (largest_bits >= 0x7F800000U) {
    block.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float amax = float_from_bits(largest_bits);
  const float inverse = block_inverse(amax);
  block.scale = block_scale(amax);
  const uint32_t key = block_key(rounding.seed, place / kBlockValues);
  for (int i = 0; i < numel; ++i) {
    block.values[i] =
        rounding.is_stochastic ? quantize(values[i], inverse, random_fraction(key, i)) : quantize(values[i], inverse);
  }
}

// values → wire[first + i], which on int8 begins a block. Returns how many values saturated.
template <class W, class C>
int64_t encode_values(const C* values, int64_t numel, const Scaling<C>& scaling, Rounding rounding, void* wire,
                      int64_t first) {
  if constexpr (std::is_same_v<W, Int8Block>) {
    int64_t num_saturated = 0;
    for (int64_t i = 0; i < numel; i += kBlockValues) {
      const int64_t length = std::min<int64_t>(kBlockValues, numel - i);
      float scaled[kBlockValues];
      for (int64_t j = 0; j < length; ++j) {
        scaled[j] = pack_value<float>(values[i + j], scaling.multiplier, scaling.limit, num_saturated);
      }
      encode_block(scaled, length, rounding, first + i, *element_of<W>(wire, first + i));
    }
    return num_saturated;
  } else {
    return pack_rows(values, element_of<W>(wire, first), numel, scaling.multiplier, scaling.limit);
  }
}

// residual[i] = (values[i] - what decoding wire[first + i] gives) * unit, where that is finite.
template <class W, class C>
inline __attribute__((always_inline)) void keep_loss(const C* values, int64_t numel, const void* wire, int64_t first,
                                                     C multiplier, C unit, C* residual) {
  const W* encoded = element_of<W>(wire, first);
  for (int64_t i = 0; i < numel; ++i) {
    C sent;
    if constexpr (std::is_same_v<W, Int8Block>) {
      const Int8Block& block = encoded[i / kBlockValues];
      sent = decode(block.values[i % kBlockValues], block.scale);
    } else {
      sent = decode(encoded[i]);
    }
    const C lost = (values[i] - decode_to<C>(sent, multiplier)) * unit;
    residual[i] = is_finite(sent) ? lost : residual[i];
  }
}

}  // namespace portable

}  // namespace fastsync::cpu
