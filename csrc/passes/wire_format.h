// The arithmetic of wires, written once for host and device: how one gradient value becomes a wire value and back, how
// large a value may be sent, and how a bucket's scale follows its gradients. So tests on a CPU also check what GPUs do.
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

// The type of a gradient or of a wire. Only wires have blocks: kInt8 and kInt4.
enum class DType : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt8, kInt4 };
constexpr int kNumDTypes = 6;

using c10::BFloat16;
using c10::Half;

// Note [Wires]
//   A wire is a sequence of units of one type. A unit is a single value, or a block of kBlockValues values that share a
//   scale. Each type of block has a file in wires/. It is a struct with
//     kBits    the bits of a value
//     scale    a float; nan if any of the block's values was not finite
//     bytes    whole numbers in two's complement; a value is its number times the scale. The least number is not used
//     put      packs neighbouring numbers, a multiple of four, into the bytes that they take
//     get      unpacks them
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

// True if the squares of a few values may be added up in float. It gets their largest magnitude, or nan. Then no square
// exceeds float's largest, and none that matters to the sum vanishes below its smallest.
FASTSYNC_HOST_DEVICE bool has_safe_squares(float largest) { return largest >= 0x1p-40F && largest <= 0x1p60F; }

// ---- single values --------------------------------------------------------------------------------------------------

// A stored value as float or double, which is exact; and back, which is the one rounding, to nearest even.

template <class T>
FASTSYNC_HOST_DEVICE Compute<T> decode(T value) {
  return static_cast<Compute<T>>(value);
}

template <class T>
FASTSYNC_HOST_DEVICE T encode(Compute<T> value) {
  return static_cast<T>(value);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// The largest magnitude of a value that enters a block. The largest number times the scale, and the mean of such values
// over any number of ranks, then stay below float's largest in spite of their roundings.
template <class Unit>
inline constexpr double kEncodingLimit = kIsBlock<Unit> ? kLargest<BFloat16> : std::numeric_limits<double>::infinity();

// The largest number in a block.
constexpr float largest_number(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }
template <class Block>
inline constexpr float kLargestNumber = largest_number(Block::kBits);

// A block's scale and its inverse follow from the largest magnitude of its values. They take it to be at least this, so
// that all values that are sent and decoded are zero or normal floats.
constexpr float kSmallestAmax = 0x1p-110F;

template <class Block>
FASTSYNC_HOST_DEVICE float block_scale(float amax) {
  return (amax < kSmallestAmax ? kSmallestAmax : amax) / kLargestNumber<Block>;
}
template <class Block>
FASTSYNC_HOST_DEVICE float block_inverse(float amax) {
  return kLargestNumber<Block> / (amax < kSmallestAmax ? kSmallestAmax : amax);
}

// To the nearest integer, halves to even: at 3 * 2^22 the float adder has no bits left for fractions.
FASTSYNC_HOST_DEVICE int32_t round_to_int(float value) {  // of at most 2^22
  return static_cast<int32_t>(float_bits(value + 0x1.8p23F)) - 0x4B400000;
}

// ---- scaled and clamped ---------------------------------------------------------------------------------------------

// value * multiplier, clamped to ±limit. An inf or nan is not clamped, because it must arrive.
template <class C>
FASTSYNC_HOST_DEVICE C scale_and_clamp(C value, C multiplier, C limit, bool& saturated) {
  const C scaled = value * multiplier;
  saturated = magnitude(scaled) > limit && is_finite(value);
  return saturated ? (scaled < C(0) ? -limit : limit) : scaled;
}

// A wire value as a value of type T. What is finite on the wire stays finite in T. It saturates if T does not hold it,
// not even by rounding.
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

// The largest magnitude that a rank may send if values are added over world_size ranks in the wire's own precision. No
// order of additions reaches infinity then: n values of at most L sum to at most n L (1 + u)^(n - 1), u being half a
// unit in the last place at 1. It is rounded down to a value that the wire holds. Wires of full width have no limit.
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
// factor of 64 to float16's largest, for gradients that are larger than the mean and for gradients that grow.
constexpr int kTargetExponent = 10;
constexpr int kMaxScaleExponent = 118;  // enough for float32's largest
constexpr int kMaxIdleScaleExponent = 24;

FASTSYNC_HOST_DEVICE int scale_exponent_for(double amax) {
  int exponent;
  frexp(amax, &exponent);
  const int wanted = kTargetExponent - exponent;
  return wanted > kMaxScaleExponent ? kMaxScaleExponent : (wanted < -kMaxScaleExponent ? -kMaxScaleExponent : wanted);
}

// The scale for the next step. It follows from this step's scale and the largest finite magnitude of the means. It
// falls at once and rises by a factor of two a step, so that the step after a small one does not saturate. If all means
// are zero, the gradients may have been too small for the scale. Then it rises, up to a bound from which it soon comes
// back.
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
