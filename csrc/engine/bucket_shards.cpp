#include "engine/bucket_shards.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>

namespace fastsync {

void BucketShards::make(const Plan& plan, const FlatGradients& gradients) {
  static std::atomic<int64_t> newest = 0;
  number_ = ++newest;
  rank_ = plan.team->rank();
  of_ranks_.assign(plan.shards.size(), {});
  for (int64_t rank = 0; rank < static_cast<int64_t>(of_ranks_.size()); ++rank) {
    const std::vector<Range>& ranges = plan.shards[rank];
    const bool is_own = rank == rank_;
    if (is_own) {
      const int64_t numel = ranges.empty() ? 0 : ranges.back().offset + ranges.back().end - ranges.back().begin;
      means_ = at::zeros({numel}, gradients.grads.front().options());
    }
    for (const Range& range : ranges) {
      for (size_t i = 0; i < gradients.segments.size(); ++i) {
        const Segment& segment = gradients.segments[i];
        const int64_t begin = std::max(range.begin, segment.offset);
        const int64_t end = std::min(range.end, segment.offset + segment.numel);
        if (begin < end) {
          const int64_t offset = range.offset + begin - range.begin;
          of_ranks_[rank].push_back(
              {i, begin - segment.offset, end - begin, is_own ? means_.narrow(0, offset, end - begin) : at::Tensor()});
        }
      }
    }
  }
}

const std::vector<ShardPiece>& BucketShards::own() const {
  static const std::vector<ShardPiece> none;
  return of_ranks_.empty() ? none : of_ranks_[rank_];
}

bool BucketShards::drop(size_t gradient) {
  bool had_values = false;
  for (const ShardPiece& piece : own()) {
    if (piece.gradient == gradient && piece.means.any().item<bool>()) {
      piece.means.zero_();
      had_values = true;
    }
  }
  return had_values;
}

}  // namespace fastsync
