// A thread reads and writes neighbouring values of a gradient, a residual or a wire by these types.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

constexpr int kVectorBytes = 16;
constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xFFFFFFFFU;

// Returns the number of values that a thread has at a time. It is a vector of the wider type, or a thread's part of a
// block, which a whole warp works on.
template <class In, class Out>
constexpr int vector_width() {
  constexpr int64_t kBlock = std::max(kUnitValues<In>, kUnitValues<Out>);
  return kBlock > 1 ? static_cast<int>(kBlock / kWarp)
                    : kVectorBytes / static_cast<int>(std::max(sizeof(In), sizeof(Out)));
}

template <class T, int kWidth>
struct alignas(kWidth * sizeof(T)) Vector {
  T values[kWidth];
};

// A thread's values in a wire's type. The first num_valid are in memory, and zeros follow them.
template <class W, int kWidth>
struct Encoded {
  using Whole = Vector<W, kWidth>;
  Whole vector;

  // Encodes values that are within the limit.
  template <class C>
  __device__ static Encoded from(const C (&values)[kWidth]) {
    Encoded encoded;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      encoded.vector.values[i] = encode<W>(static_cast<Compute<W>>(values[i]));
    }
    return encoded;
  }

  // With known_whole, all values are valid, and aligned as a vector.
  __device__ static Encoded load(const W* data, int64_t index, int num_valid, bool known_whole = false) {
    Encoded loaded{};
    if (known_whole || (num_valid == kWidth && is_aligned(data + index))) {
      loaded.vector = *reinterpret_cast<const Whole*>(data + index);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i < num_valid) {
          loaded.vector.values[i] = data[index + i];
        }
      }
    }
    return loaded;
  }

  __device__ void store(W* data, int64_t index, int num_valid, bool known_whole = false) const {
    if (known_whole || (num_valid == kWidth && is_aligned(data + index))) {
      *reinterpret_cast<Whole*>(data + index) = vector;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (i < num_valid) {
          data[index + i] = vector.values[i];
        }
      }
    }
  }

  template <class C>
  __device__ C decoded(int i) const {
    return static_cast<C>(decode(vector.values[i]));
  }

  __device__ static bool is_aligned(const W* data) { return reinterpret_cast<uintptr_t>(data) % sizeof(Whole) == 0; }
};

// A thread's part of a block. The whole warp encodes the block together. Values that are not valid are zero.
template <class Block, int kWidth>
  requires kIsBlock<Block>
struct Encoded<Block, kWidth> {
  using Whole = Vector<uint8_t, kWidth * Block::kBits / 8>;
  float scale;
  Whole vector;

  template <class C>
  __device__ static Encoded from(const C (&values)[kWidth]) {
    uint32_t largest_bits = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      largest_bits = max(largest_bits, float_bits(static_cast<float>(values[i])) & 0x7FFFFFFFU);
    }
    const float amax = float_from_bits(__reduce_max_sync(kWholeWarp, largest_bits));
    if (!is_finite(amax)) {
      return {float_from_bits(0x7FC00000U), {}};
    }
    const float inverse = block_inverse<Block>(amax);
    int32_t numbers[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      numbers[i] = round_to_int(static_cast<float>(values[i]) * inverse);
    }
    Encoded encoded{block_scale<Block>(amax), {}};
    Block::put(numbers, encoded.vector.values);
    return encoded;
  }

  __device__ static Encoded load(const Block* blocks, int64_t index, int /*num_valid*/, bool /*known_whole*/ = false) {
    const Block& block = blocks[index / kBlockValues];
    return {block.scale, *reinterpret_cast<const Whole*>(block.bytes + byte_of(index))};
  }

  __device__ void store(Block* blocks, int64_t index, int /*num_valid*/, bool /*known_whole*/ = false) const {
    Block& block = blocks[index / kBlockValues];
    *reinterpret_cast<Whole*>(block.bytes + byte_of(index)) = vector;
    if (index % kBlockValues == 0) {
      block.scale = scale;
    }
  }

  template <class C>
  __device__ C decoded(int i) const {
    int32_t numbers[kWidth];
    Block::get(vector.values, numbers);
    return static_cast<C>(static_cast<float>(numbers[i]) * scale);
  }

  __device__ static bool is_aligned(const Block* /*blocks*/) { return true; }

 private:
  __device__ static int64_t byte_of(int64_t index) { return index % kBlockValues * Block::kBits / 8; }
};

}  // namespace fastsync::cuda
