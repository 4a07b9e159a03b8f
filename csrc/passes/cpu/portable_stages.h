// The stages in plain C++, for CPUs without AVX2, for float64 and for what is left after the last whole block.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "passes/cpu/rows.h"
#include "passes/pack_unpack.h"

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

template <class C, class W>
FASTSYNC_HOST_DEVICE C decode_at(const W* wire, int64_t i) {
  return static_cast<C>(decode(wire[i]));
}

template <class C>
FASTSYNC_HOST_DEVICE C decode_at(const Int8Block* blocks, int64_t i) {
  const Int8Block& block = blocks[i / kBlockValues];
  return static_cast<C>(decode(block.values[i % kBlockValues], block.scale));
}

template <class G, class C>
void convert(const G* gradient, int64_t numel, C* values) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = decode(gradient[i]);
  }
}

template <class G, class C>
void subtract(const G* gradient, const G* subtrahend, int64_t numel, C* values) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] = decode(gradient[i]) - decode(subtrahend[i]);
  }
}

template <class W, class C>
void sum_wires(const Wires& wires, int64_t first, int64_t numel, C multiplier, C* sums) {
  const W* wire = wires.at<W>(0, first);
  for (int64_t i = 0; i < numel; ++i) {
    sums[i] = decode_at<C>(wire, i) * multiplier;
  }
  for (int64_t r = 1; r < wires.num; ++r) {
    wire = wires.at<W>(r, first);
    for (int64_t i = 0; i < numel; ++i) {
      sums[i] += decode_at<C>(wire, i) * multiplier;
    }
  }
}

template <class C>
void add_residual(const C* residual, C scale, int64_t numel, C* values) {
  for (int64_t i = 0; i < numel; ++i) {
    values[i] += residual[i] * scale;
  }
}

// Encodes a block; what follows the first numel values is zeros.
inline void encode_block(const float* values, int64_t numel, Rounding rounding, int64_t place, Int8Block& block) {
  uint32_t largest_bits = 0;
  for (int64_t i = 0; i < numel; ++i) {
    largest_bits = std::max(largest_bits, float_bits(values[i]) & 0x7FFFFFFFU);
  }
  std::fill_n(block.values, kBlockValues, int8_t{0});
  if (largest_bits >= 0x7F800000U) {
    block.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float amax = float_from_bits(largest_bits);
  const float inverse = block_inverse(amax);
  block.scale = block_scale(amax);
  const uint32_t key = block_key(rounding, place / kBlockValues);
  for (int i = 0; i < numel; ++i) {
    block.values[i] =
        rounding.is_stochastic ? quantize(values[i], inverse, random_fraction(key, i)) : quantize(values[i], inverse);
  }
}

template <class C>
int64_t encode_values(const C* values, int64_t numel, const Scaling<C>& scaling, Rounding rounding, int64_t place,
                      Int8Block* blocks) {
  int64_t num_saturated = 0;
  for (int64_t i = 0; i < numel; i += kBlockValues) {
    const int64_t length = std::min<int64_t>(kBlockValues, numel - i);
    float scaled[kBlockValues];
    for (int64_t j = 0; j < length; ++j) {
      scaled[j] = pack_value<float>(values[i + j], scaling.multiplier, scaling.limit, num_saturated);
    }
    encode_block(scaled, length, rounding, place + i, blocks[i / kBlockValues]);
  }
  return num_saturated;
}

template <class W, class C>
int64_t encode_values(const C* values, int64_t numel, const Scaling<C>& scaling, Rounding /*rounding*/,
                      int64_t /*place*/, W* wire) {
  return pack_rows(values, wire, numel, scaling.multiplier, scaling.limit);
}

template <class W, class C>
void keep_loss(const C* values, int64_t numel, const W* encoded, C multiplier, C unit, C* residual) {
  for (int64_t i = 0; i < numel; ++i) {
    const C sent = decode_at<C>(encoded, i);
    if (is_finite(sent)) {
      residual[i] = (values[i] - decode_to<C>(sent, multiplier)) * unit;
    }
  }
}

}  // namespace portable

}  // namespace fastsync::cpu
