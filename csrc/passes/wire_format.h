// The arithmetic of the wire, written once for host and device: how one gradient value becomes a wire value and back,
// how large a value may be sent, and how a bucket's scale follows its gradients. Tests on a CPU vouch for the GPU.
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

// Those of blocks are wires' alone.
enum class DType : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kInt8, kInt4 };
constexpr int kNumDTypes = 6;

using c10::BFloat16;
using c10::Half;

// A wire is units of one type, one after the other: single values, or blocks of kBlockValues that share a scale, which
// have a file each in wires/. A block is a struct of kBits, of a value; the scale, a float; and bytes. A value is a
// whole number, of at most kBits in two's complement but for the least, times the scale. The scale is nan where a value
// was not finite. put turns neighbours, a multiple of four of them, into the bytes that they take, and get goes back.
constexpr int kBlockValues = 128;
template <class Unit>
inline constexpr bool kIsBlock = requires { Unit::kBits; };
template <class Unit>
inline constexpr int64_t kUnitValues = kIsBlock<Unit> ? kBlockValues : 1;

// What a value is multiplied and rounded in: float for all but double.
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

// Whether a few squares may be added up in float, of values of which this is the largest magnitude, or nan: none is
// beyond float's largest, nor does any that counts for something vanish below its smallest.
FASTSYNC_HOST_DEVICE bool has_safe_squares(float largest) { return largest >= 0x1p-40F && largest <= 0x1p60F; }

// ---- a stored value to float or double, which is always exact, and back: the one rounding, to nearest even ----------

template <class T>
FASTSYNC_HOST_DEVICE Compute<T> decode(T value) {
  return static_cast<Compute<T>>(value);
}

template <class T>
FASTSYNC_HOST_DEVICE T encode(Compute<T> value) {
  return static_cast<T>(value);
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// What a value may be before it enters a block: the largest whole number times the scale, and the mean of such values
// over any number of ranks, then stay below float's largest in spite of their roundings.
template <class Unit>
inline constexpr double kEncodingLimit = kIsBlock<Unit> ? kLargest<BFloat16> : std::numeric_limits<double>::infinity();

// Of a block's whole numbers.
constexpr float largest_number(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }
template <class Block>
inline constexpr float kLargestNumber = largest_number(Block::kBits);

// A block's scale and its inverse follow from its largest magnitude, which counts as no smaller than this: what is then
// on the wire, and what comes out of it, is zero or a normal float.
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

// value * multiplier, kept within ±limit. Only finite values are clamped: an inf or nan in a gradient must arrive.
template <class C>
FASTSYNC_HOST_DEVICE C scale_and_clamp(C value, C multiplier, C limit, bool& saturated) {
  const C scaled = value * multiplier;
  saturated = magnitude(scaled) > limit && is_finite(value);
  return saturated ? (scaled < C(0) ? -limit : limit) : scaled;
}

// A wire value to the value stored in a gradient of type T. What was finite on the wire stays finite in T: saturated
// where T has no such number, not even by rounding.
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

// The largest magnitude one rank may put on a wire whose values are then added over world_size ranks in the wire's own
// precision, so that no order of additions reaches infinity: n values of at most L sum to at most n L (1 + u)^(n - 1),
// u being half a unit in the last place at 1. Rounded down to the wire's grid. No limit for the full-width wires.
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

// A bucket's scale is a power of two that brings its largest reduced magnitude to [2^9, 2^10): a factor of 64 below
// float16's largest, for ranks whose own gradients are larger than the mean and for gradients that grow.
constexpr int kTargetExponent = 10;
constexpr int kMaxScaleExponent = 118;  // enough for float32's largest
constexpr int kMaxIdleScaleExponent = 24;

FASTSYNC_HOST_DEVICE int scale_exponent_for(double amax) {
  int exponent;
  frexp(amax, &exponent);
  const int wanted = kTargetExponent - exponent;
  return wanted > kMaxScaleExponent ? kMaxScaleExponent : (wanted < -kMaxScaleExponent ? -kMaxScaleExponent : wanted);
}

// The scale for the next step from this step's scale and the largest finite magnitude among the reduced gradients.
// It falls at once and rises by a factor of two a step, so that one small step does not make the next one saturate.
// All zeros may mean that everything was too small for the scale: it rises, but not beyond what soon comes back.
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
