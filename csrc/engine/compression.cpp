#include "engine/compression.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "transport/agreement.h"

namespace fastsync {

namespace {

// One-shot takes less time than two-shot until each rank sends so many bytes more.
constexpr int64_t kOneShotBytes = 1 << 16;
// In shared memory, one-shot takes less time for buckets up to this size. For two ranks there is no limit, because
// two-shot never moves less.
constexpr int64_t kOneShotBytesInMemory = 1 << 17;
// Without a wire of its own, one-shot between two ranks takes less time than all_reduce for buckets up to this size.
// See algorithm_for.
constexpr int64_t kOneShotBytesOfTwo = 1 << 22;

}  // namespace

// A sum of two float32 values is the same in either order. So two ranks may add uncompressed gradients themselves,
// which takes less time than Gloo's all_reduce. For large buckets only bandwidth counts: there all_reduce is as fast,
// and needs less memory.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& ranks, bool share_memory,
                        bool ranks_add) {
  const int64_t world_size = ranks.size();
  if (compression.ranks_per_node > 1) {
    return Algorithm::kTwoLevel;
  }
  if (share_memory) {
    const int64_t bytes = bytes_of(numel, compression.wire_dtype(grad));
    const bool one_shot_is_faster = world_size == 2 || bytes <= kOneShotBytesInMemory;
    return compression.algorithm.value_or(one_shot_is_faster ? Algorithm::kOneShot : Algorithm::kTwoShot);
  }
  if (!compression.sums_in_float32 && !ranks_add) {
    const bool is_exact = !compression.wire && (grad == DType::kFloat32 || grad == DType::kFloat64);
    const bool is_small = bytes_of(numel, grad) <= kOneShotBytesOfTwo;
    return is_exact && is_small && world_size == 2 && ranks.messages_are_fast() ? Algorithm::kOneShot
                                                                                : Algorithm::kAllReduce;
  }
  return rank_sum_for(compression, grad, numel, world_size);
}

Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members) {
  const int64_t bytes = bytes_of(numel, compression.wire_dtype(grad));
  const bool one_shot_is_faster = (num_members - 1) * (num_members - 2) * bytes <= kOneShotBytes * num_members;
  return compression.algorithm.value_or(one_shot_is_faster ? Algorithm::kOneShot : Algorithm::kTwoShot);
}

const Compression& CompressionTable::at(int64_t numel) const {
  return std::find_if(rows.begin(), rows.end() - 1, [&](const auto& row) { return numel <= row.first; })->second;
}

bool CompressionTable::is_lossless() const {
  return std::all_of(rows.begin(), rows.end(),
                     [](const auto& row) { return !row.second.wire && row.second.low_rank == 0; });
}

std::string CompressionTable::arithmetic(c10::Device device) const {
  if (std::ranges::none_of(rows, [](const auto& row) { return row.second.low_rank > 0; })) {
    return "";
  }
  const std::string libraries = c10::str("libraries ", fingerprint(at::show_config()));
  return !device.is_cpu() ? c10::str("lowrank by ", libraries, "\n")
                          : c10::str("lowrank by ", at::get_cpu_capability(), ", ", at::get_num_threads(), " threads, ",
                                     libraries, "\n");
}

}  // namespace fastsync
