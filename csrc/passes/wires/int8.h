// The wire of int8: blocks of 128 values that share a scale, rounded to nearest even or at random.
#pragma once

#include <cstdint>

#include "passes/wire_format.h"

namespace fastsync {

// As they travel: value = values[i] * scale. The scale is nan where a value was not finite.
constexpr int kBlockValues = 128;
struct Int8Block {
  float scale;
  int8_t values[kBlockValues];
};

// What a value may be before it enters a block: 127 times the block's scale, and the mean of such values over any
// number of ranks, then stay below float's largest in spite of their roundings.
constexpr float kInt8Limit = kLargest<BFloat16>;

template <>
struct WireFormat<Int8Block> {
  static constexpr int64_t kValues = kBlockValues;
  static constexpr double kLimit = kInt8Limit;
};

// A block's scale and its inverse follow from its largest magnitude, which counts as no smaller than this: what is then
// on the wire, and what comes out of it, is zero or a normal float.
constexpr float kSmallestAmax = 0x1p-110F;
constexpr float kLargestInt8 = 127.0F;

FASTSYNC_HOST_DEVICE float block_scale(float amax) {
  return (amax < kSmallestAmax ? kSmallestAmax : amax) / kLargestInt8;
}

FASTSYNC_HOST_DEVICE float block_inverse(float amax) {
  return kLargestInt8 / (amax < kSmallestAmax ? kSmallestAmax : amax);
}

// To the nearest integer, halves to even: at 3 * 2^22 the float adder has no bits left for fractions.
FASTSYNC_HOST_DEVICE int32_t round_to_int(float value) {  // of at most 2^22
  return static_cast<int32_t>(float_bits(value + 0x1.8p23F)) - 0x4B400000;
}

// Stochastic rounding adds random bits below the point of a fixed-point number with so many, and cuts them all off.
constexpr int kFractionBits = 15;
constexpr int32_t kOneFixed = 1 << kFractionBits;
constexpr int32_t kLargestFixed = 127 * kOneFixed;

// Where the seed stays what it is, as in a CUDA graph, each step has a seed of its own. The multiplier is one of
// G. Steele and S. Vigna, Computationally Easy, Spectrally Good Multipliers for Congruential Pseudorandom Number
// Generators, 2022.
FASTSYNC_HOST_DEVICE uint64_t seed_of_step(uint64_t seed, int64_t step) {
  return seed + static_cast<uint64_t>(step) * 0xD1342543DE82EF95ULL;
}

// The random bits of a block follow from this key of it, of which one seed has one for each block on a wire: the
// finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
FASTSYNC_HOST_DEVICE uint32_t block_key(uint64_t seed, int64_t block) {
  uint64_t bits = seed + (static_cast<uint64_t>(block) + 1) * 0x9E3779B97F4A7C15ULL;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<uint32_t>((bits ^ (bits >> 31)) >> 32);
}

// kFractionBits random bits for one of a block's values: the finaliser of MurmurHash3 (A. Appleby, 2011).
FASTSYNC_HOST_DEVICE int32_t random_fraction(uint32_t key, int place) {
  uint32_t bits = key + static_cast<uint32_t>(place);
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6BU;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35U;
  return static_cast<int32_t>((bits ^ (bits >> 16)) >> (32 - kFractionBits));
}

// How it rounds: to nearest even, or up with a probability of the fraction that is lost, by bits that follow from the
// seed, the step and the value's place on the wire. The other wires round to nearest even.
struct Rounding {
  bool is_stochastic = false;
  uint64_t seed = 0;
  const int64_t* step = nullptr;  // on the gradients' device, where unpack counts it; null means 0
};

FASTSYNC_HOST_DEVICE uint32_t block_key(const Rounding& rounding, int64_t block) {
  return block_key(seed_of_step(rounding.seed, rounding.step != nullptr ? *rounding.step : 0), block);
}

FASTSYNC_HOST_DEVICE int8_t quantize(float value, float inverse) {
  return static_cast<int8_t>(round_to_int(value * inverse));
}

FASTSYNC_HOST_DEVICE int8_t quantize(float value, float inverse, int32_t fraction) {
  const int32_t fixed = round_to_int(value * inverse * static_cast<float>(kOneFixed));
  const int32_t clamped = fixed > kLargestFixed ? kLargestFixed : (fixed < -kLargestFixed ? -kLargestFixed : fixed);
  return static_cast<int8_t>((clamped + fraction) >> kFractionBits);
}

FASTSYNC_HOST_DEVICE float decode(int8_t value, float scale) { return static_cast<float>(value) * scale; }

}  // namespace fastsync
