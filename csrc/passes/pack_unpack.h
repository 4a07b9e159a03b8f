// The passes go over the memory of gradients and wires: pack, unpack and reduce. Each backend implements them, on raw
// pointers and without tensors.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "passes/wire_format.h"
#include "passes/wires/int4.h"
#include "passes/wires/int8.h"

namespace fastsync {

// A segment is a gradient, or a contiguous range of one, and its place on the wire. On a wire of blocks it begins a new
// block, and zeros fill up its last block. It is aligned, so that a GPU reads it in two loads.
struct alignas(16) Segment {
  void* data;
  int64_t numel;
  int64_t offset;  // where it begins on the wire, in values
  // What a pass computes with besides: packing with residuals, unpacking with a factor or with this rank's own values.
  // All segments of a call have it, or none has.
  void* operand = nullptr;

  // For each value, what the wire has not carried yet, as Compute<G>.
  FASTSYNC_HOST_DEVICE void* residuals() const { return operand; }
  FASTSYNC_HOST_DEVICE const double* factor() const { return static_cast<const double*>(operand); }
  // In place of the values of UnpackArgs::own_wire.
  const void* own_values() const { return operand; }
};

// Returns the number of values from the segment's end to the next multiple of the alignment.
FASTSYNC_HOST_DEVICE int64_t gap_behind(const Segment& segment, int64_t alignment) {
  return (alignment - (segment.offset + segment.numel) % alignment) % alignment;
}

// The statistics of a bucket, as indices into a row of doubles. Doubles hold counts up to 2^53 exactly.
enum Stat : int { kSumOfSquares, kNumNonfinite, kNumSaturated, kMaxMagnitude, kNumStats };

// Adds the statistics of one call to those of the calls before it. The first call replaces what is there, except the
// count of values that saturated, which packing has begun.
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

// A bucket may be packed and unpacked in several calls. The first call begins the statistics anew, and the others add
// to them. The last call sets the bucket's scale for the next step.
struct Position {
  bool is_first = true;
  bool is_last = true;
};

// Pack encodes gradients to a wire:
//     value = gradient[i] * weight + residual[i]
//     wire[offset + i] = encode(value * multiplier * bucket_scale), clamped to ±limit if value is finite
//     residual[i] = value - decode(wire[offset + i]) / (multiplier * bucket_scale)
// Products and sums are in Compute<G>, in this order. Without residuals the weight is a factor of the multiplier. With
// a weight of 0 the gradient counts as 0, even if it is inf or nan. A residual stays as it was if its value on the
// wire, or another value of the same block, is not finite. With a gap_alignment, zeros follow each segment up to the
// next multiple of it. All other memory between the segments on the wire stays as it is. The pass writes
// stats[kNumSaturated]. The wire may be the gradients' own memory if both have one type.
struct PackArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  DType wire_dtype;
  void* wire;
  double multiplier;
  double limit;               // on wires of blocks, kEncodingLimit also holds
  const float* bucket_scale;  // on the gradients' device; null means 1
  double* stats;              // on the gradients' device
  Position position = {};
  const double* weight = nullptr;  // on the gradients' device; null means 1
  int64_t gap_alignment = 1;       // in values; for wires of single values
  int64_t residual_shift = 0;      // in bytes, from where a residual is read to where it is written; 0 but on a CPU
};

// Note [Sums by a tree]
//   With by_tree, unpack and reduce add up wires by a binary tree, and the multiplier multiplies its root:
//       sum = (((wire 0 + wire 1) + (wire 2 + wire 3)) + ...) * multiplier
//   A complete tree has as many leaves as the largest power of two that is not above the number of wires. The first
//   leaves are a wire each. The last leaves are the sum of two wires each, as many as it takes for all wires. So 3
//   wires make (0 + (1 + 2)), and 5 make ((0 + 1) + (2 + (3 + 4))). Each wire is then the sum of an aligned block of a
//   larger tree, see fastsync/sync/micro_batches.py.
constexpr int kMostTreeLevels = 16;  // so there may be 2^15 wires

// Returns how many sums of the tree are complete once this wire is there.
inline int sums_behind_wire(int64_t wire, int64_t num_wires) {
  const auto places = 2 * static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_wires)));
  const int64_t num_wide = places - num_wires;  // wires that take two places
  const bool is_wide = wire < num_wide;
  const int64_t end = wire + 1 + (is_wide ? wire + 1 : num_wide);
  return std::countr_zero(static_cast<uint64_t>(end)) - (is_wide ? 1 : 0);
}

// Unpack adds up wires to gradients:
//     gradient[i] = encode(sum over r of (wire r)[offset + i] * multiplier * (factor / bucket_scale))
// Products and sums are in Compute<G>, from the first wire to the last. A finite sum that the gradient's type does not
// hold becomes the type's largest value. The pass writes the statistics of the gradients: stats[kSumOfSquares],
// stats[kNumNonfinite], and stats[kMaxMagnitude] of the finite values. It adds to stats[kNumSaturated]. Then it sets
// bucket_scale for the next step. The scale follows the largest magnitude times scale_share. The wire may be the
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
  double multiplier = 1.0;   // multiplies each wire's values, before they are added up
  Position position = {};
  double scale_share = 1.0;
  bool by_tree = false;  // see Note [Sums by a tree]
  // On a CPU: the wire that this rank has not packed, because the segments have its values. -1 if it has packed all.
  int64_t own_wire = -1;
};

// Reduce adds up wires to another wire:
//     value = sum over r of (wire r)[i] * multiplier + residual[i] * bucket_scale * residual_share
//     out[i] = encode(value), clamped to ±limit if value is finite
//     residual[i] = (value - decode(out[i])) / (bucket_scale * residual_share)
// Products and sums are in Compute<G>, from the first wire to the last. A residual stays as it was if out[i], or
// another value of the same block, is not finite. out may be one of the wires.
struct ReduceArgs {
  const void* wire;
  int64_t num_wires;
  int64_t stride_bytes;  // from one wire to the next
  int64_t numel;         // how many values each wire has; on wires of blocks a multiple of kBlockValues
  DType grad_dtype;      // the bucket's; values are added up in its Compute<G>
  DType wire_dtype;
  void* out;
  DType out_dtype;  // the same as wire_dtype on wires of blocks
  double multiplier;
  double limit;               // see PackArgs
  const float* bucket_scale;  // packing has multiplied values with it; null means 1
  void* residual;             // Compute<G> [numel]; null without error feedback
  double residual_share = 1.0;
  bool by_tree = false;  // see Note [Sums by a tree]
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
    case DType::kBytes:
      return;
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

// Whether values of type Own may travel as W: unchanged, or in a type that is narrower than its Compute type.
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

// Whether wires of type W may be added up in type C and written as Out. Blocks are written as the same blocks.
template <class C, class W, class Out>
inline constexpr bool kReduces = kTravelsAs<C, W> && kTravelsAs<C, Out> && (std::is_same_v<W, Out> || !kIsBlock<W>);

// Calls call(C{}, W{}, Out{}) with the type of the sums, and the types of the units that are read and written.
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

// The size of a wire's unit.
struct WireUnit {
  int64_t values;
  int64_t bytes;
  int bits;  // the bits of one value
};

inline WireUnit unit_of(DType wire) {
  WireUnit unit{1, 1, 8};  // of bytes
  dispatch(wire, [&](auto w) {
    using W = decltype(w);
    unit = {kUnitValues<W>, sizeof(W), 8 * static_cast<int>(sizeof(W))};
    if constexpr (kIsBlock<W>) {
      unit.bits = W::kBits;
    }
  });
  return unit;
}

// Returns the number of units that hold so many values.
template <class W>
FASTSYNC_HOST_DEVICE constexpr int64_t num_units(int64_t values) {
  return (values + kUnitValues<W> - 1) / kUnitValues<W>;
}

// Returns the unit of a wire that begins with the value at this index.
template <class W>
FASTSYNC_HOST_DEVICE W* unit_at(void* wire, int64_t index) {
  return static_cast<W*>(wire) + index / kUnitValues<W>;
}
template <class W>
FASTSYNC_HOST_DEVICE const W* unit_at(const void* wire, int64_t index) {
  return unit_at<W>(const_cast<void*>(wire), index);
}

// Returns the largest magnitude that values may have before they are encoded, in their Compute type.
template <class W, class C>
C limit_on(double limit) {
  return static_cast<C>(std::fmin(limit, kEncodingLimit<W>));
}

// The memory of a device that a call of pack or unpack works in. Two calls that share it must not overlap.
struct Scratch {
  void* totals = nullptr;          // of cuda::kTotalsBytes; zero before its first use, and after each call
  const Segment* tiles = nullptr;  // the call's segments, cut into tiles, if the backend wants them on the device
  int64_t num_tiles = 0;
};

// The passes of a backend. `stream` is the native handle of the stream that they run
// on.
struct Passes {
  void (*pack)(const PackArgs&, const Scratch&, void* stream);
  void (*unpack)(const UnpackArgs&, const Scratch&, void* stream);
  void (*reduce)(const ReduceArgs&, const Scratch&, void* stream);
  // See cuda::tile_size and cuda::upload; null if the backend wants no tiles on the device.
  int64_t (*tile_size)(int64_t num_segments, DType grad, DType wire) = nullptr;
  void (*upload)(const Segment* tiles, int64_t num_tiles, Segment* to, void* stream) = nullptr;
};

// The passes of our two backends. Only CUDA takes scratch memory and a stream, which is a cudaStream_t.
namespace cpu {
// Those of the best instruction set that the machine has.
Passes passes();
}  // namespace cpu

namespace cuda {

// The blocks of a launch add up their statistics in this memory.
constexpr int64_t kMaxBlocks = 2048;
constexpr int64_t kTotalsBytes = (1 + 4 * kMaxBlocks) * 8;

// Returns the largest size of the tiles that a call wants on the device, or 0 if it wants none there.
int64_t tile_size(int64_t num_segments, DType grad, DType wire);

// These throw std::runtime_error with CUDA's message if a launch fails.

// Writes tiles to the device's memory. They travel as a kernel's arguments. So the host's memory is free at once, and
// a CUDA graph has a copy of its own.
void upload(const Segment* tiles, int64_t num_tiles, Segment* to, void* stream);
void pack(const PackArgs& args, const Scratch& scratch, void* stream);
void unpack(const UnpackArgs& args, const Scratch& scratch, void* stream);
void reduce(const ReduceArgs& args, const Scratch& scratch, void* stream);
}  // namespace cuda

}  // namespace fastsync
