// The passes over memory, as raw-pointer signatures that the CPU and the CUDA backend both implement. No tensors here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "passes/wire_format.h"
#include "passes/wires/int4.h"
#include "passes/wires/int8.h"

namespace fastsync {

// One gradient, or a piece of one, contiguous, and where its first element lies in the wire buffer: in elements, on a
// wire of blocks at the beginning of one. Its last block may be partly filled; what is left of it is zeros.
struct Segment {
  void* data;
  int64_t numel;
  int64_t offset;
  // Compute<G>, one for each element: what the wire has not carried yet. Null where it is lost.
  void* residual = nullptr;
};

// What a bucket's passes found out, in one row of doubles so that one tensor holds it (counts are exact up to 2^53).
enum Stat : int { kSumOfSquares, kNumNonfinite, kNumSaturated, kMaxMagnitude, kNumStats };

// What one call has found among the gradients, to what the calls before have; packing begins the count of what
// saturated.
FASTSYNC_HOST_DEVICE void add_to_stats(double* stats, bool is_first, double sum_of_squares, int64_t num_nonfinite,
                                       int64_t num_saturated, double largest) {
  const double before = is_first ? 0.0 : stats[kMaxMagnitude];
  stats[kSumOfSquares] = (is_first ? 0.0 : stats[kSumOfSquares]) + sum_of_squares;
  stats[kNumNonfinite] = (is_first ? 0.0 : stats[kNumNonfinite]) + static_cast<double>(num_nonfinite);
  stats[kMaxMagnitude] = largest > before ? largest : before;
  if (num_saturated > 0) {
    stats[kNumSaturated] += static_cast<double>(num_saturated);
  }
}

// A bucket may pass in several calls: the first one begins the statistics anew, the others add to them, and the last
// one moves the bucket's scale on for the next step.
struct Turn {
  bool is_first = true;
  bool is_last = true;
};

// gradients → wire: wire[offset + i] = encode(value * multiplier * bucket_scale), within ±limit if finite. The value is
// gradient[i] * weight + residual[i], in Compute<G> and in this order, and the new residual[i] is the
// value minus what decoding gives; where the value on the wire, or one of its block's, is not finite, the
// residual stays as it was. Without a residual the weight is a part of the multiplier. With a weight of 0 the gradient
// counts as 0, whatever it is. What lies between segments on the wire stays as it is. Writes stats[kNumSaturated]. The
// wire may be the gradients' own memory where both have one type.
struct PackArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  DType wire_dtype;
  void* wire;
  double multiplier;
  double limit;               // in blocks, whose scales follow the values, no more than kEncodingLimit
  const float* bucket_scale;  // on the gradients' device; null means 1
  double* stats;              // on the gradients' device
  Turn turn = {};
  const double* weight = nullptr;  // on the gradients' device; null means 1
};

// wires → gradients: gradient[i] = encode(sum over r of (wire r)[offset + i] * multiplier / bucket_scale), and the
// statistics of what was written: stats[kSumOfSquares], stats[kNumNonfinite] and stats[kMaxMagnitude] (over the finite
// ones). Products and sums are in Compute<G>, from the first wire to the last. A finite sum that the gradient's type
// does not hold becomes its largest, and is added to what packing has counted in stats[kNumSaturated]. Then moves
// bucket_scale, which follows the largest magnitude times scale_share, on for the next step. The wire may be the
// gradients' own memory, as in packing.
struct UnpackArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  DType wire_dtype;
  const void* wire;
  float* bucket_scale;
  double* stats;
  int64_t num_wires = 1;
  int64_t stride_bytes = 0;  // from one wire to the next
  double multiplier = 1.0;   // of each wire's value, before the sum
  Turn turn = {};
  double scale_share = 1.0;
};

// wires → wire: out[i] = encode(value), within ±limit if finite, where value = (sum over r of (wire r)[i] * multiplier)
// + residual[i] * bucket_scale * residual_share, in Compute<G> and from the first wire to the last. The new residual[i]
// is what decoding out[i] misses of the value, divided by both factors; it stays as it was where out[i], or one of its
// block's values, is not finite. out may be one of the wires.
struct ReduceArgs {
  const void* wire;
  int64_t num_wires;
  int64_t stride_bytes;  // from one wire to the next
  int64_t numel;         // of each; in blocks a multiple of kBlockValues
  DType grad_dtype;      // of the bucket: what is summed in follows from it
  DType wire_dtype;      // of the wires
  void* out;
  DType out_dtype;  // wire_dtype where that is one of blocks
  double multiplier;
  double limit;               // as in PackArgs
  const float* bucket_scale;  // what the wires' values have been multiplied with; null means 1
  void* residual;             // Compute<G> [numel]; null where it is lost
  double residual_share = 1.0;
};

// Calls call(T{}) with the type of a gradient's element, or of a wire's unit.
template <class Call>
void dispatch(DType dtype, const Call& call) {
  switch (dtype) {
    case DType::kFloat32:
      return call(float{});
    case DType::kFloat64:
      return call(double{});
    case DType::kFloat16:
      return call(Half{});
    case DType::kBFloat16:
      return call(BFloat16{});
    case DType::kInt8:
      return call(Int8Block{});
    case DType::kInt4:
      return call(Int4Block{});
  }
}

// Calls call(G{}) with the type of a gradient.
template <class Call>
void dispatch_grad(DType grad, const Call& call) {
  dispatch(grad, [&](auto g) {
    if constexpr (!kIsBlock<decltype(g)>) {
      call(g);
    }
  });
}

// Whether values of type Own travel as W: as they are, or narrower than what is computed in.
template <class Own, class W>
inline constexpr bool kTravelsAs = std::is_same_v<W, Own> || !std::is_same_v<W, Compute<W>>;

// Calls call(G{}, W{}) with the types of a gradient and of its wire's unit.
template <class Call>
void dispatch_wire(DType grad, DType wire, const Call& call) {
  dispatch_grad(grad, [&](auto g) {
    using G = decltype(g);
    dispatch(wire, [&](auto w) {
      if constexpr (kTravelsAs<G, decltype(w)>) {
        call(G{}, w);
      }
    });
  });
}

// Whether wires of one type are read and of another written where C is what is summed in. Only blocks become nothing
// else.
template <class C, class W, class Out>
inline constexpr bool kReduces = kTravelsAs<C, W> && kTravelsAs<C, Out> && (std::is_same_v<W, Out> || !kIsBlock<W>);

// Calls call(C{}, W{}, Out{}) with what is summed in and the units of the wires read and written.
template <class Call>
void dispatch_reduce(DType grad, DType wire, DType out, const Call& call) {
  const auto with_compute = [&](auto c) {
    using C = decltype(c);
    dispatch(wire, [&](auto w) {
      using W = decltype(w);
      dispatch(out, [&](auto o) {
        if constexpr (kReduces<C, W, decltype(o)>) {
          call(C{}, W{}, o);
        }
      });
    });
  };
  grad == DType::kFloat64 ? with_compute(double{}) : with_compute(float{});
}

// A wire's unit.
struct WireUnit {
  int64_t values;
  int64_t bytes;
  int bits;  // of a value
};

inline WireUnit unit_of(DType wire) {
  WireUnit unit{};
  dispatch(wire, [&](auto w) {
    using W = decltype(w);
    unit = {kUnitValues<W>, sizeof(W), 8 * static_cast<int>(sizeof(W))};
    if constexpr (kIsBlock<W>) {
      unit.bits = W::kBits;
    }
  });
  return unit;
}

// How many units hold so many values.
template <class W>
FASTSYNC_HOST_DEVICE constexpr int64_t num_units(int64_t values) {
  return (values + kUnitValues<W> - 1) / kUnitValues<W>;
}

// The unit of a wire that begins with the value of this index.
template <class W>
FASTSYNC_HOST_DEVICE W* unit_at(void* wire, int64_t index) {
  return static_cast<W*>(wire) + index / kUnitValues<W>;
}
template <class W>
FASTSYNC_HOST_DEVICE const W* unit_at(const void* wire, int64_t index) {
  return unit_at<W>(const_cast<void*>(wire), index);
}

// What values may be before they are encoded, as a number of what is computed in.
template <class W, class C>
C limit_on(double limit) {
  return static_cast<C>(std::fmin(limit, kEncodingLimit<W>));
}

// Each backend has these. Scratch memory and the stream, a cudaStream_t, are CUDA's alone.
namespace cpu {
void pack(const PackArgs& args, void* workspace, void* stream);
void unpack(const UnpackArgs& args, void* workspace, void* stream);
void reduce(const ReduceArgs& args, void* workspace, void* stream);
}  // namespace cpu

namespace cuda {

// Scratch memory of one bucket on the device, all zero before its first use; the kernels leave it ready for the next.
// Two launches that share it must not overlap. reduce needs none.
constexpr int64_t kMaxBlocks = 2048;
constexpr int64_t kWorkspaceBytes = (1 + 4 * kMaxBlocks) * 8;

// Throw std::runtime_error with CUDA's message when a launch fails.
void pack(const PackArgs& args, void* workspace, void* stream);
void unpack(const UnpackArgs& args, void* workspace, void* stream);
void reduce(const ReduceArgs& args, void* workspace, void* stream);
}  // namespace cuda

}  // namespace fastsync
