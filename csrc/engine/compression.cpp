#include "engine/compression.h"

#include <algorithm>

namespace fastsync {

namespace {

// One step over the network costs less than two until each rank sends so many bytes more than with two_shot.
constexpr int64_t kOneShotBytes = 1 << 16;
// The limit in memory that ranks share. Two ranks have none: in two steps they never move less.
constexpr int64_t kOneShotBytesInMemory = 1 << 17;
// The limit at full width between two ranks, which may also leave the sum to the group: see algorithm_for.
constexpr int64_t kOneShotBytesOfTwo = 1 << 22;

}  // namespace

// A sum of two float32 values is the same in either order. So between two ranks full width need not go through
// all_reduce, whose steps take longer on Gloo. For large buckets only bandwidth counts: there its ring is as fast, and
// needs less memory.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& ranks,
                        bool share_memory) {
  const int64_t world_size = ranks.size();
  if (compression.ranks_per_node > 1) {
    return Algorithm::kTwoLevel;
  }
  if (share_memory) {
    const int64_t bytes = bytes_of(numel, compression.wire_dtype(grad));
    const bool is_fast_at_once = world_size == 2 || bytes <= kOneShotBytesInMemory;
    return compression.algorithm.value_or(is_fast_at_once ? Algorithm::kOneShot : Algorithm::kTwoShot);
  }
  if (!compression.sums_in_float32) {
    const bool is_exact = !compression.wire && (grad == DType::kFloat32 || grad == DType::kFloat64);
    const bool is_small = bytes_of(numel, grad) <= kOneShotBytesOfTwo;
    return is_exact && is_small && world_size == 2 && ranks.sends_at_once() ? Algorithm::kOneShot
                                                                            : Algorithm::kAllReduce;
  }
  return rank_sum_for(compression, grad, numel, world_size);
}

Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members) {
  const int64_t bytes = bytes_of(numel, compression.wire_dtype(grad));
  const bool is_fast_at_once = (num_members - 1) * (num_members - 2) * bytes <= kOneShotBytes * num_members;
  return compression.algorithm.value_or(is_fast_at_once ? Algorithm::kOneShot : Algorithm::kTwoShot);
}

const Compression& CompressionTable::at(int64_t numel) const {
  return std::find_if(rows.begin(), rows.end() - 1, [&](const auto& row) { return numel <= row.first; })->second;
}

bool CompressionTable::is_lossless() const {
  return std::all_of(rows.begin(), rows.end(), [](const auto& row) { return !row.second.wire; });
}

}  // namespace fastsync
