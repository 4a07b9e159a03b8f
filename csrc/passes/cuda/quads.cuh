// Passes that do more than convert one value to another: sums over wires, residuals, blocks of int8. Each thread takes
// four neighbouring values at a time, so that a warp has a block's.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "passes/chunk_table.h"
#include "passes/cuda/totals.cuh"
#include "passes/pack_unpack.h"

namespace fastsync::cuda {

constexpr int kThreads = 256;
constexpr int kQuad = 4;
constexpr int kQuadsPerThread = 4;  // in flight before the first is used
constexpr int kQuadChunk = kThreads * kQuad * kQuadsPerThread;
constexpr unsigned kWholeWarp = 0xFFFFFFFFU;
static_assert(kQuad * 32 == kBlockValues && kQuadChunk % kBlockValues == 0);

template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T values[kQuad];
};

template <class T>
__device__ bool is_whole_quad(const T* data, int num_valid) {
  return num_valid == kQuad && reinterpret_cast<uintptr_t>(data) % sizeof(Quad<T>) == 0;
}

// The values from index on, and zeros after the first num_valid of them.
template <class C, class T>
__device__ void load_quad(const T* data, int64_t index, int num_valid, C (&values)[kQuad]) {
  Quad<T> loaded{};
  if (is_whole_quad(data + index, num_valid)) {
    loaded = *reinterpret_cast<const Quad<T>*>(data + index);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i < num_valid) {
        loaded.values[i] = data[index + i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    values[i] = static_cast<C>(decode(loaded.values[i]));
  }
}

template <class C>
__device__ void load_quad(const Int8Block* blocks, int64_t index, int /*num_valid*/, C (&values)[kQuad]) {
  const Int8Block& block = blocks[index / kBlockValues];
  const auto loaded = *reinterpret_cast<const Quad<int8_t>*>(block.values + index % kBlockValues);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    values[i] = static_cast<C>(decode(loaded.values[i], block.scale));
  }
}

template <class T>
__device__ void store_quad(T* data, int64_t index, int num_valid, const Quad<T>& quad) {
  if (is_whole_quad(data + index, num_valid)) {
    *reinterpret_cast<Quad<T>*>(data + index) = quad;
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i < num_valid) {
        data[index + i] = quad.values[i];
      }
    }
  }
}

// Encodes values that are within the limit already, and says what decoding them gives.
template <class W, class C>
__device__ void encode_quad(const C (&scaled)[kQuad], int num_valid, Rounding /*rounding*/, W* wire, int64_t index,
                            C (&sent)[kQuad]) {
  Quad<W> encoded;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    encoded.values[i] = encode<W>(static_cast<Compute<W>>(scaled[i]));
    sent[i] = static_cast<C>(decode(encoded.values[i]));
  }
  store_quad(wire, index, num_valid, encoded);
}

// The whole warp encodes one block. What is not valid is zero.
template <class C>
__device__ void encode_quad(const C (&scaled)[kQuad], int /*num_valid*/, Rounding rounding, Int8Block* blocks,
                            int64_t index, C (&sent)[kQuad]) {
  const int place = static_cast<int>(index % kBlockValues);
  float values[kQuad];
  uint32_t largest_bits = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    values[i] = static_cast<float>(scaled[i]);
    largest_bits = max(largest_bits, float_bits(values[i]) & 0x7FFFFFFFU);
  }
  largest_bits = __reduce_max_sync(kWholeWarp, largest_bits);
  const bool is_finite_block = largest_bits < 0x7F800000U;
  const float amax = float_from_bits(largest_bits);
  const float scale = is_finite_block ? block_scale(amax) : float_from_bits(0x7FC00000U);
  const float inverse = block_inverse(amax);
  const uint32_t key = rounding.is_stochastic ? block_key(rounding, index / kBlockValues) : 0;
  Quad<int8_t> quantized{};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (is_finite_block) {
      quantized.values[i] = rounding.is_stochastic ? quantize(values[i], inverse, random_fraction(key, place + i))
                                                   : quantize(values[i], inverse);
    }
    sent[i] = static_cast<C>(decode(quantized.values[i], scale));
  }
  Int8Block& block = blocks[index / kBlockValues];
  *reinterpret_cast<Quad<int8_t>*>(block.values + place) = quantized;
  if (place == 0) {
    block.scale = scale;
  }
}

template <class C>
__device__ void add_residual(const void* residual, C scale, int64_t index, int num_valid, C (&values)[kQuad]) {
  C kept[kQuad];
  load_quad(static_cast<const C*>(residual), index, num_valid, kept);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    values[i] += kept[i] * scale;
  }
}

template <class C>
__device__ void keep_loss(const C (&values)[kQuad], const C (&sent)[kQuad], C multiplier, C unit, void* residual,
                          int64_t index, int num_valid) {
  C* const kept = static_cast<C*>(residual);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (i < num_valid && is_finite(sent[i])) {
      kept[index + i] = (values[i] - decode_to<C>(sent[i], multiplier)) * unit;
    }
  }
}

// The sum over the wires of their values, each times the multiplier.
template <class C, class W>
struct Sums {
  const void* first_wire;
  int64_t num_wires;
  int64_t stride_bytes;
  C multiplier;

  __device__ void load(int64_t index, int num_valid, C (&sums)[kQuad]) const {
    const char* wire = static_cast<const char*>(first_wire);
    for (int64_t r = 0; r < num_wires; ++r, wire += stride_bytes) {
      C values[kQuad];
      load_quad(reinterpret_cast<const W*>(wire), index, num_valid, values);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        sums[i] = r == 0 ? values[i] * multiplier : sums[i] + values[i] * multiplier;
      }
    }
  }
};

template <class G, class W>
struct PackQuads {
  using Gradient = G;
  using C = Compute<G>;
  using Total = Saturations;
  static constexpr const char* kName = "pack";
  static constexpr bool kByQuads = true;

  void* wire;
  const float* bucket_scale;
  const double* weight;
  C multiplier;
  C limit;
  Rounding rounding;
  double* stats;
  int64_t alignment;

  __device__ void load(const Segment& segment, int64_t index, int num_valid, C (&values)[kQuad]) const {
    load_quad(static_cast<const G*>(segment.data), index, num_valid, values);
    const auto own_weight = static_cast<C>(*weight_or_unit(weight));
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      values[i] = own_weight == C(0)            ? C(0)
                  : segment.residual != nullptr ? values[i] * own_weight
                                                : values[i];  // then the factor has it
    }
    if (segment.residual != nullptr) {
      add_residual(segment.residual, C(1), index, num_valid, values);
    }
  }

  __device__ void store(const Segment& segment, int64_t index, int num_valid, const C (&values)[kQuad],
                        Total::Batch& batch) const {
    C factor = multiplier * static_cast<C>(*scale_or_unit(bucket_scale));
    if (segment.residual == nullptr) {
      factor *= static_cast<C>(*weight_or_unit(weight));
    }
    C scaled[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      bool saturated;
      scaled[i] = scale_and_clamp(values[i], factor, limit, saturated);
      batch.count += saturated;
    }
    C sent[kQuad];
    encode_quad(scaled, num_valid, rounding, static_cast<W*>(wire), segment.offset + index, sent);
    if (segment.residual != nullptr) {
      keep_loss(values, sent, C(1) / factor, C(1), segment.residual, index, num_valid);
    }
  }

  __device__ void end_segment(const Segment& segment) const { fill_gap(static_cast<W*>(wire), segment, alignment); }
  __device__ void move_on() const {}
};

template <class G, class W>
struct UnpackQuads {
  using Gradient = G;
  using C = Compute<G>;
  using Total = Squares<C>;
  static constexpr const char* kName = "unpack";
  static constexpr bool kByQuads = true;

  Sums<C, W> sums;
  float* bucket_scale;
  int64_t* step;
  double* stats;
  double scale_share;

  __device__ void load(const Segment& segment, int64_t index, int num_valid, C (&values)[kQuad]) const {
    sums.load(segment.offset + index, num_valid, values);
  }

  __device__ void store(const Segment& segment, int64_t index, int num_valid, const C (&values)[kQuad],
                        Total::Batch& batch) const {
    const C inverse = C(1) / static_cast<C>(*scale_or_unit(bucket_scale));
    Quad<G> gradients;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      bool saturated;
      gradients.values[i] = decode_to<G>(values[i], inverse, saturated);
      if (i < num_valid) {
        batch.add_value(decode(gradients.values[i]));
        batch.num_saturated += saturated;
      }
    }
    store_quad(static_cast<G*>(segment.data), index, num_valid, gradients);
  }

  __device__ void end_segment(const Segment& /*segment*/) const {}
  __device__ void move_on() const { fastsync::move_on(bucket_scale, step, stats, scale_share); }
};

template <class T, class W, class Out>
struct ReduceQuads {
  using Gradient = T;
  using C = T;
  using Total = Saturations;  // counted by nobody

  Sums<C, W> sums;
  void* out;
  C limit;
  const float* bucket_scale;
  Rounding rounding;

  __device__ void load(const Segment& segment, int64_t index, int num_valid, C (&values)[kQuad]) const {
    sums.load(index, num_valid, values);
    if (segment.residual != nullptr) {
      add_residual(segment.residual, static_cast<C>(*scale_or_unit(bucket_scale)), index, num_valid, values);
    }
  }

  __device__ void store(const Segment& segment, int64_t index, int num_valid, const C (&values)[kQuad],
                        Total::Batch& /*batch*/) const {
    C within[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      bool saturated;
      within[i] = scale_and_clamp(values[i], C(1), limit, saturated);
    }
    C sent[kQuad];
    encode_quad(within, num_valid, rounding, static_cast<Out*>(out), index, sent);
    if (segment.residual != nullptr) {
      const C unit = C(1) / static_cast<C>(*scale_or_unit(bucket_scale));
      keep_loss(values, sent, C(1), unit, segment.residual, index, num_valid);
    }
  }
};

// One chunk of at most kQuadChunk values. Neighbouring threads take neighbouring quads; a warp goes on as long as the
// block that it shares has a value, for its threads encode it together. Input and output may be the same memory, but no
// thread writes what another reads.
template <class Pass>
__device__ void convert_quads(const Pass& pass, const Segment& segment, const Chunk& chunk,
                              typename Pass::Total& total) {
  const auto index_of = [](int q) { return (q * kThreads + static_cast<int>(threadIdx.x)) * kQuad; };
  const auto num_valid_at = [&](int index) {
    return static_cast<int>(max(int64_t{0}, min(int64_t{kQuad}, chunk.length - index)));
  };
  typename Pass::C values[kQuadsPerThread][kQuad];
#pragma unroll
  for (int q = 0; q < kQuadsPerThread; ++q) {
    const int index = index_of(q);
    if (index / kBlockValues * kBlockValues < chunk.length) {
      pass.load(segment, chunk.begin + index, num_valid_at(index), values[q]);
    }
  }
  typename Pass::Total::Batch batch{};
#pragma unroll
  for (int q = 0; q < kQuadsPerThread; ++q) {
    const int index = index_of(q);
    if (index / kBlockValues * kBlockValues < chunk.length) {
      pass.store(segment, chunk.begin + index, num_valid_at(index), values[q], batch);
    }
  }
  add_batch(batch, total, [&](typename Pass::Total& of_thread) {
    const auto* const gradient = static_cast<const typename Pass::Gradient*>(segment.data) + chunk.begin;
    for (int q = 0; q < kQuadsPerThread; ++q) {
      of_thread.add_values(gradient + index_of(q), num_valid_at(index_of(q)));
    }
  });
}

}  // namespace fastsync::cuda
