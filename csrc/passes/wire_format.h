// This is the arithmetic of wires, written once for host and device, so that tests on a CPU also check what GPUs do. A
// gradient's value becomes a wire's value and back. There are limits for values, and a bucket's scale follows its
// gradients.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define FASTSYNC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FASTSYNC_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fastsync {

// The type of a gradient or of a wire. Only wires have blocks: kInt8 and kInt4. No pass takes kBytes: these are values
// of any type, which are only gathered.
enum class DType : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt8, kInt4, kBytes };
constexpr int kNumDTypes = 7;

using c10::BFloat16;
using c10::Half;

// Note [Wires]
//   A wire is the bytes in which values travel: a sequence of units of one type. A unit is a single value, or a block
//   of kBlockValues values that share a scale. Each type of block has a file in wires/. It is a struct with these
//   members:
//     kBits    The bits of a value.
//     scale    A float. It is nan if any of the block's values was not finite.
//     bytes    Whole numbers in two's complement. A value is its number times the scale. The least number is not used.
//     put      Packs neighbouring numbers, a multiple of four, into the bytes that they take.
//     get      Unpacks them.
constexpr int kBlockValues = 128;
template <class Unit>
inline constexpr bool kIsBlock = requires { Unit::kBits; };
template <class Unit>
inline constexpr int64_t kUnitValues = kIsBlock<Unit> ? kBlockValues : 1;

// The type that values of type T are multiplied and summed in: double for double, else float.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class T>
inline constexpr Compute<T> kLargest = std::numeric_limits<T>::max();
template <>
inline constexpr float kLargest<Half> = 65504.0F;
template <>
inline constexpr float kLargest<BFloat16> = 0x1.FEp127F;

FASTSYNC_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FASTSYNC_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class C>
FASTSYNC_HOST_DEVICE bool is_finite(C value) {
  return value <= kLargest<C> && value >= -kLargest<C>;
}

template <class C>
FASTSYNC_HOST_DEVICE C magnitude(C value) {
  return value < C(0) ? -value : value;
}

// Whether the squares of a few values may be added up in float. It gets their largest magnitude, or nan. If true, no
// square exceeds float's largest value, and no square that matters to the sum vanishes below float's smallest.
FASTSYNC_HOST_DEVICE bool has_safe_squares(float largest) { return largest >= 0x1p-40F && largest <= 0x1p60F; }

// ---- single values --------------------------------------------------------------------------------------------------

// decode makes a float or double of a stored value, which is exact. encode makes a stored value, and rounds to nearest
// even.

template <class T>
FASTSYNC_HOST_DEVICE Compute<T> decode(T value) {
  return static_cast<Compute<T>>(value);
}

template <class T>
FASTSYNC_HOST_DEVICE T encode(Compute<T> value) {
  return static_cast<T>(value);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// The largest magnitude of a value that enters a block. Then the block's largest number times the scale stays below
// float's largest value, in spite of roundings. So does the mean of such values over any number of ranks.
template <class Unit>
inline constexpr double kEncodingLimit = kIsBlock<Unit> ? kLargest<BFloat16> : std::numeric_limits<double>::infinity();

// The largest number in a block.
constexpr float largest_number(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }
template <class Block>
inline constexpr float kLargestNumber = largest_number(Block::kBits);

// A block's scale and its inverse follow from the largest magnitude of its values, called amax. If amax is less than
// this, this takes its place, so that all values that are sent and decoded are zero or normal floats.
constexpr float kSmallestAmax = 0x1p-110F;

template <class Block>
FASTSYNC_HOST_DEVICE float block_scale(float amax) {
  return (amax < kSmallestAmax ? kSmallestAmax : amax) / kLargestNumber<Block>;
}
template <class Block>
FASTSYNC_HOST_DEVICE float block_inverse(float amax) {
  return kLargestNumber<Block> / (amax < kSmallestAmax ? kSmallestAmax : amax);
}

// Rounds to the nearest integer, and halves to even: at 3 * 2^22 the float adder has no bits left for fractions. The
// value's magnitude must be at most 2^22.
FASTSYNC_HOST_DEVICE int32_t round_to_int(float value) {
  return static_cast<int32_t>(float_bits(value + 0x1.8p23F)) - 0x4B400000;
}

// ---- scaled and clamped ---------------------------------------------------------------------------------------------

// Returns value * multiplier, clamped to ±limit. An inf or nan is not clamped, because it must arrive.
template <class C>
FASTSYNC_HOST_DEVICE C scale_and_clamp(C value, C multiplier, C limit, bool& saturated) {
  const C scaled = value * multiplier;
  saturated = magnitude(scaled) > limit && is_finite(value);
  return saturated ? (scaled < C(0) ? -limit : limit) : scaled;
}

// Decodes a wire's value to a value of type T. A value that is finite on the wire stays finite in T. It saturates if T
// cannot hold it, not even by rounding.
template <class T, class Wire>
FASTSYNC_HOST_DEVICE T decode_to(Wire wire, Compute<T> multiplier, bool& saturated) {
  const auto value = static_cast<Compute<T>>(decode(wire));
  const auto clamped = scale_and_clamp<Compute<T>>(value, multiplier, kLargest<T>, saturated);
  saturated = saturated && !is_finite(decode(encode<T>(value * multiplier)));
  return encode<T>(clamped);
}
template <class T, class Wire>
FASTSYNC_HOST_DEVICE T decode_to(Wire wire, Compute<T> multiplier) {
  bool saturated;
  return decode_to<T>(wire, multiplier, saturated);
}

// ---- ranges ---------------------------------------------------------------------------------------------------------

// Returns the largest magnitude that a rank may send if values are added over world_size ranks in the wire's own
// precision. Then no order of additions reaches infinity: n values of at most L sum to at most n L (1 + u)^(n - 1).
// Here u is half a unit in the last place at 1. The limit is rounded down to a value that the wire holds. float32 and
// float64 have no limit.
inline double saturation_limit(DType wire, int64_t world_size) {
  if (wire != DType::kFloat16 && wire != DType::kBFloat16) {
    return std::numeric_limits<double>::infinity();
  }
  const bool is_half = wire == DType::kFloat16;
  const int significand_bits = is_half ? 11 : 8;
  const double largest = is_half ? kLargest<Half> : kLargest<BFloat16>;
  const double growth = std::pow(1.0 + std::ldexp(1.0, -significand_bits), static_cast<double>(world_size - 1));
  int exponent;
  const double fraction = std::frexp(largest / (static_cast<double>(world_size) * growth), &exponent);
  return std::ldexp(std::floor(std::ldexp(fraction, significand_bits)), exponent - significand_bits);
}

// A bucket's scale is a power of two that brings the largest magnitude of the means to [2^9, 2^10). That leaves a
// factor of 64 to float16's largest value, for gradients that are larger than the mean and for gradients that grow.
constexpr int kTargetExponent = 10;
constexpr int kMaxScaleExponent = 118;  // enough for float32's largest value
constexpr int kMaxIdleScaleExponent = 24;

FASTSYNC_HOST_DEVICE int scale_exponent_for(double amax) {
  int exponent;
  frexp(amax, &exponent);
  const int wanted = kTargetExponent - exponent;
  return wanted > kMaxScaleExponent ? kMaxScaleExponent : (wanted < -kMaxScaleExponent ? -kMaxScaleExponent : wanted);
}

// Returns the scale for the next step. It follows from this step's scale and the largest finite magnitude of the means.
// It falls at once, but rises by a factor of two a step, so that large gradients after small ones do not saturate. If
// all means are zero, the gradients may have been too small for the scale. Then it rises, up to a bound from which it
// soon comes back.
FASTSYNC_HOST_DEVICE float next_bucket_scale(float scale, double amax) {
  int exponent;
  frexp(scale, &exponent);
  exponent -= 1;  // frexp's fraction lies in [1/2, 1): a power of two 2^e comes as 1/2 · 2^(e + 1)
  if (amax > 0.0) {
    const int wanted = scale_exponent_for(amax);
    exponent = wanted < exponent + 1 ? wanted : exponent + 1;
  } else if (exponent < kMaxIdleScaleExponent) {
    exponent += 1;
  }
  return ldexpf(1.0F, exponent);
}

}  // namespace fastsync
