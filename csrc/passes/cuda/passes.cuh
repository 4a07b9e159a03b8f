// Each pass does this to a thread's vectors: it loads them, decodes and adds up, encodes and stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "passes/cuda/totals.cuh"
#include "passes/cuda/vectors.cuh"
#include "passes/pack_unpack.h"

namespace fastsync::cuda {

// A slice is the range of a tile that one thread has at a time: num_valid values from the index on. In a whole tile
// all values are valid, and the gradients and the first wire are aligned. Residuals and further wires need not be.
struct Slice {
  const Segment& tile;
  int index;
  int num_valid;
  bool is_whole;
};

// The functions below choose a pointer and not a value, because the compiler would write every loop twice for a branch.
__device__ const float kUnitScale = 1.0F;
__device__ const double kUnitWeight = 1.0;

template <class C>
__device__ C scale_or_one(const float* scale) {
  return static_cast<C>(*(scale != nullptr ? scale : &kUnitScale));
}
template <class C>
__device__ C weight_or_one(const double* weight) {
  return static_cast<C>(*(weight != nullptr ? weight : &kUnitWeight));
}

template <class C, int kWidth>
__device__ void add_residual(const Slice& at, C scale, C (&values)[kWidth]) {
  if (at.tile.residuals() == nullptr) {
    return;
  }
  const auto kept = Encoded<C, kWidth>::load(static_cast<const C*>(at.tile.residuals()), at.index, at.num_valid);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    values[i] += kept.vector.values[i] * scale;
  }
}

// residual[i] = (values[i] - decoded * multiplier) * factor, unless the decoded value is inf or nan.
template <class W, class C, int kWidth>
__device__ void keep_loss(const Slice& at, const C (&values)[kWidth], const Encoded<W, kWidth>& sent, C multiplier,
                          C factor) {
  C* const kept = static_cast<C*>(at.tile.residuals());
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const C decoded = sent.template decoded<C>(i);
    if (i < at.num_valid && is_finite(decoded)) {
      kept[at.index + i] = (values[i] - decode_to<C>(decoded, multiplier)) * factor;
    }
  }
}

// Adds up the wires' values, each times the multiplier, from the first wire to the last. It loads several wires before
// it adds the first of them, so that they wait for memory together.
template <class C, class W, int kWidth>
struct Sum {
  static constexpr int kLoadedTogether = 2;  // more do not fit into registers

  const void* first_wire;
  int64_t num_wires;
  int64_t stride_bytes;
  C multiplier;

  __device__ Encoded<W, kWidth> load(int64_t wire, int64_t index, int num_valid, bool known_whole = false) const {
    const char* const begin = static_cast<const char*>(first_wire) + wire * stride_bytes;
    return Encoded<W, kWidth>::load(reinterpret_cast<const W*>(begin), index, num_valid, known_whole);
  }

  __device__ bool is_aligned(int64_t index) const {
    return Encoded<W, kWidth>::is_aligned(unit_at<W>(first_wire, index));
  }

  __device__ void add_up(const Encoded<W, kWidth>& first, int64_t index, int num_valid, C (&sums)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sums[i] = first.template decoded<C>(i) * multiplier;
    }
    for (int64_t wire = 1; wire < num_wires; wire += kLoadedTogether) {
      Encoded<W, kWidth> next[kLoadedTogether];
#pragma unroll
      for (int w = 0; w < kLoadedTogether; ++w) {
        if (wire + w < num_wires) {
          next[w] = load(wire + w, index, num_valid);
        }
      }
#pragma unroll
      for (int w = 0; w < kLoadedTogether; ++w) {
        if (wire + w < num_wires) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            sums[i] += next[w].template decoded<C>(i) * multiplier;
          }
        }
      }
    }
  }
};

template <class G, class W>
struct Pack {
  using Gradient = G;
  using C = Compute<G>;
  using Total = Saturations;
  static constexpr const char* kName = "pack";
  static constexpr int kWidth = vector_width<G, W>();
  static constexpr int kUnit = kUnitValues<W>;
  static constexpr int kOperandBytes = sizeof(C);
  using Loaded = Encoded<G, kWidth>;

  W* wire;
  const float* bucket_scale;
  const double* weight;
  C multiplier;
  C limit;
  double* stats;
  int64_t gap_alignment;
  C own_weight = C(1);

  __device__ Pack with_scale() const {
    Pack scaled = *this;
    scaled.multiplier *= scale_or_one<C>(bucket_scale);
    scaled.own_weight = weight_or_one<C>(weight);
    return scaled;
  }
  __device__ const Pack& with_factor(const Segment& /*tile*/) const { return *this; }

  __device__ bool is_aligned(const Segment& tile) const {
    return Loaded::is_aligned(static_cast<const G*>(tile.data)) &&
           Encoded<W, kWidth>::is_aligned(unit_at<W>(wire, tile.offset));
  }

  __device__ Loaded load(const Slice& at) const {
    return Loaded::load(static_cast<const G*>(at.tile.data), at.index, at.num_valid, at.is_whole);
  }

  __device__ void decode(const Slice& at, const Loaded& loaded, C (&values)[kWidth]) const {
    const C factor = at.tile.residuals() != nullptr ? own_weight : C(1);  // else encode multiplies with the weight
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = own_weight == C(0) ? C(0) : loaded.template decoded<C>(i) * factor;
    }
    add_residual(at, C(1), values);
  }

  __device__ void encode(const Slice& at, const C (&values)[kWidth], Total& total) const {
    const C factor = at.tile.residuals() != nullptr ? multiplier : multiplier * own_weight;
    C scaled[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bool saturated;
      scaled[i] = scale_and_clamp(values[i], factor, limit, saturated);
      total.count += saturated;
    }
    const auto sent = Encoded<W, kWidth>::from(scaled);
    sent.store(wire, at.tile.offset + at.index, at.num_valid, at.is_whole);
    if (at.tile.residuals() != nullptr) {
      keep_loss(at, values, sent, C(1) / factor, C(1));
    }
  }

  // All threads of a block call it. Only the last tile of a segment has a gap behind it, because a tile's size is a
  // multiple of the alignment.
  __device__ void fill_gap(const Segment& tile) const {
    if constexpr (!kIsBlock<W>) {
      for (int64_t i = threadIdx.x; i < gap_behind(tile, gap_alignment); i += blockDim.x) {
        wire[tile.offset + tile.numel + i] = W{};
      }
    }
  }

  __device__ void move_on() const {}
};

template <class G, class W>
struct Unpack {
  using Gradient = G;
  using C = Compute<G>;
  using Total = Squares<C>;
  static constexpr const char* kName = "unpack";
  static constexpr int kWidth = vector_width<W, G>();
  static constexpr int kUnit = kUnitValues<W>;
  static constexpr int kOperandBytes = 0;  // the tiles of a segment share its factor
  using Loaded = Encoded<W, kWidth>;

  Sum<C, W, kWidth> sum;
  float* bucket_scale;
  double* stats;
  double scale_share;
  C factor = C(1);

  // The scale is read for each tile, because a second factor would not fit into registers.
  __device__ const Unpack& with_scale() const { return *this; }
  __device__ Unpack with_factor(const Segment& tile) const {
    Unpack own = *this;
    own.factor = C(1) / scale_or_one<C>(bucket_scale) * weight_or_one<C>(tile.factor());
    return own;
  }

  // Whether gradients get the bits that their wire has.
  __device__ bool is_identity() const {
    return std::is_same_v<G, W> && sum.num_wires == 1 && sum.multiplier == C(1) && factor == C(1);
  }

  __device__ bool is_aligned(const Segment& tile) const {
    return Encoded<G, kWidth>::is_aligned(static_cast<const G*>(tile.data)) && sum.is_aligned(tile.offset);
  }

  __device__ Loaded load(const Slice& at) const {
    return sum.load(0, at.tile.offset + at.index, at.num_valid, at.is_whole);
  }

  __device__ void decode(const Slice& at, const Loaded& loaded, C (&values)[kWidth]) const {
    sum.add_up(loaded, at.tile.offset + at.index, at.num_valid, values);
  }

  __device__ void encode(const Slice& at, const C (&values)[kWidth], Total::Batch& batch) const {
    Encoded<G, kWidth> gradients;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bool saturated;
      const G gradient = decode_to<G>(values[i], factor, saturated);
      gradients.vector.values[i] = gradient;
      if (i < at.num_valid) {
        batch.add_value(fastsync::decode(gradient));
        batch.num_saturated += saturated;
      }
    }
    const bool stays = is_identity() && unit_at<W>(sum.first_wire, at.tile.offset) == at.tile.data;
    if (!stays) {
      gradients.store(static_cast<G*>(at.tile.data), at.index, at.num_valid, at.is_whole);
    }
  }

  __device__ void move_on() const {
    if (bucket_scale != nullptr) {
      *bucket_scale = next_bucket_scale(*bucket_scale, stats[kMaxMagnitude] * scale_share);
    }
  }
};

// The only segment of this pass stands for the sums. It has no memory besides the residual.
template <class T, class W, class Out>
struct Reduce {
  using Gradient = T;
  using C = T;
  using Total = Nothing;
  static constexpr const char* kName = "reduce";
  static constexpr int kWidth = vector_width<W, Out>();
  static constexpr int kUnit = std::max<int>(kUnitValues<W>, kUnitValues<Out>);
  static constexpr int kOperandBytes = sizeof(C);
  using Loaded = Encoded<W, kWidth>;

  Sum<C, W, kWidth> sum;
  Out* out;
  C limit;
  const float* bucket_scale;
  C residual_share;
  C scale = C(1);  // multiplies the residuals

  __device__ Reduce with_scale() const {
    Reduce scaled = *this;
    scaled.scale = scale_or_one<C>(bucket_scale) * residual_share;
    return scaled;
  }
  __device__ const Reduce& with_factor(const Segment& /*tile*/) const { return *this; }

  __device__ bool is_aligned(const Segment& /*tile*/) const {
    return Encoded<Out, kWidth>::is_aligned(out) && sum.is_aligned(0);
  }

  __device__ Loaded load(const Slice& at) const {
    return sum.load(0, at.tile.offset + at.index, at.num_valid, at.is_whole);
  }

  __device__ void decode(const Slice& at, const Loaded& loaded, C (&values)[kWidth]) const {
    sum.add_up(loaded, at.tile.offset + at.index, at.num_valid, values);
    add_residual(at, scale, values);
  }

  __device__ void encode(const Slice& at, const C (&values)[kWidth], Total& /*total*/) const {
    C within[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      bool saturated;
      within[i] = scale_and_clamp(values[i], C(1), limit, saturated);
    }
    const auto sent = Encoded<Out, kWidth>::from(within);
    sent.store(out, at.tile.offset + at.index, at.num_valid, at.is_whole);
    if (at.tile.residuals() != nullptr) {
      keep_loss(at, values, sent, C(1), C(1) / scale);
    }
  }
};

}  // namespace fastsync::cuda
