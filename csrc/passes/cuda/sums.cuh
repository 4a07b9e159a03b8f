// Threads, warps and blocks add up their totals. The order of additions depends neither on the device nor on which
// block comes first.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "passes/cuda/totals.cuh"
#include "passes/cuda/vectors.cuh"
#include "passes/pack_unpack.h"

namespace fastsync::cuda {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Adds up over the first num_lanes of a warp, and returns the result to lane 0. All lanes call it.
template <class Total>
__device__ Total add_over_warp(Total total, int num_lanes = kWarp) {
  constexpr int kWords = sizeof(Total) / sizeof(unsigned);
  static_assert(sizeof(Total) % sizeof(unsigned) == 0);
  for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
    unsigned words[kWords];
    memcpy(words, &total, sizeof(Total));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = __shfl_down_sync(kWholeWarp, words[i], distance);
    }
    Total other;
    memcpy(&other, words, sizeof(Total));
    total.add(other);
  }
  return total;
}

// Adds up over the block, and returns the result to thread 0. All threads call it. Between two calls the block has to
// synchronise.
template <class Total>
__device__ Total add_over_block(const Total& own) {
  __shared__ Total of_warp[kWarps];
  const Total total = add_over_warp(own);
  if (threadIdx.x % kWarp == 0) {
    of_warp[threadIdx.x / kWarp] = total;
  }
  __syncthreads();
  return threadIdx.x < kWarp ? add_over_warp(of_warp[threadIdx.x % kWarps], kWarps) : own;
}

// ---- over the blocks of a launch. The last block to finish writes the statistics, so that these cost no launch ------

// The memory that blocks share is zero between launches.
template <class Total>
struct BlockTotals {
  unsigned num_finished;
  Total totals[kMaxBlocks];
};

// In one word: how many values have saturated and, above that, how many blocks have added theirs. One atomic operation
// adds to both. So the last block reads no other memory of the others, and nobody needs a fence.
template <>
struct BlockTotals<Saturations> {
  static constexpr int kCountBits = 52;
  static_assert(kMaxBlocks <= 1LL << (63 - kCountBits));
  unsigned long long word;
};

// Writes the sum over all blocks to stats. Returns true to one thread of the launch, which the sum is there for.
template <class Total>
__device__ bool write_stats(const Total& own, BlockTotals<Total>& shared, double* stats, bool is_first) {
  __shared__ bool is_last;
  const Total of_block = add_over_block(own);
  if (threadIdx.x == 0) {
    shared.totals[blockIdx.x] = of_block;
    __threadfence();  // the total is seen before the count ...
    is_last = atomicAdd(&shared.num_finished, 1U) == gridDim.x - 1;
    __threadfence();  // ... and a block that sees the whole count sees all totals
  }
  __syncthreads();
  if (!is_last) {
    return false;
  }
  typename Total::OfLaunch sum{};
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreads) {
    sum.add(shared.totals[block]);
  }
  sum = add_over_block(sum);
  if (threadIdx.x != 0) {
    return false;
  }
  sum.add_to(stats, is_first);
  shared.num_finished = 0;
  return true;
}

__device__ inline bool write_stats(const Saturations& own, BlockTotals<Saturations>& shared, double* stats,
                                   bool is_first) {
  constexpr int kBits = BlockTotals<Saturations>::kCountBits;
  const Saturations of_block = add_over_block(own);
  if (threadIdx.x != 0) {
    return false;
  }
  const unsigned long long before = atomicAdd(&shared.word, (1ULL << kBits) + of_block.count);
  if (before >> kBits != gridDim.x - 1) {
    return false;
  }
  const auto count = static_cast<double>((before & ((1ULL << kBits) - 1)) + of_block.count);
  stats[kNumSaturated] = (is_first ? 0.0 : stats[kNumSaturated]) + count;
  shared.word = 0;
  return true;
}

}  // namespace fastsync::cuda
