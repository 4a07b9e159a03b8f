// Makes the sums of a bucket. It chooses a plan, has room made for it in shared memory, and keeps both from sum to sum.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/bucket_shards.h"
#include "engine/compression.h"
#include "engine/send_options.h"
#include "engine/sync_times.h"
#include "sums/low_rank_sum.h"
#include "sums/planned_sum.h"
#include "sums/sum_work.h"
#include "transport/teams.h"

namespace fastsync {

class BucketSums {
 public:
  // Sums write these statistics, use this workspace, and note here what they are.
  BucketSums(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, at::Tensor stats,
             std::shared_ptr<Workspace> workspace, std::shared_ptr<BucketTotals> totals);

  const Teams& teams() const { return teams_; }
  // From now on the result is the mean times this factor.
  void set_mean_factor(double factor) { mean_factor_ = factor; }
  double mean_factor() const { return mean_factor_; }
  // From now on each rank's gradients are a sum over some of so many micro-batches, or nothing if there are more ranks.
  // The result is the mean over all micro-batches, by Note [Sums by a tree].
  void set_micro_batches(int64_t num_micro_batches) {
    num_micro_batches_ = num_micro_batches;
    mean_factor_ = 1.0 / static_cast<double>(num_micro_batches);
  }
  // Whether the newest sum had a plan.
  bool has_plan() const { return memory_.plan != nullptr; }
  // Whether choose_plan may wait for the other ranks, to make room in shared memory.
  bool may_need_room(const Compression& compression) const { return planned_for_ != compression; }
  const BucketShards& shards() const { return shards_; }
  BucketShards& shards() { return shards_; }
  // The memory of the rows, or of the wire.
  const at::Tensor& buffer(const SendOptions& options) { return memory_for(options).buffer; }

  // The newest right factor of each gradient, see LowRankSum.
  std::vector<at::Tensor>& factors() { return low_rank_.factors; }
  const std::vector<at::Tensor>& factors() const { return low_rank_.factors; }

  FlatGradients flatten(std::vector<at::Tensor> grads, const SendOptions& options, const at::Tensor& side_values) const;
  // Chooses the plan of the sum that is made next.
  void choose_plan(const FlatGradients& gradients, const SendOptions& options);
  // Makes the sum of gradients that have their scale and residuals.
  std::unique_ptr<SumWork> make(FlatGradients gradients, const SendOptions& options);
  // Makes the sum of a sparse gradient, which takes no plan.
  std::unique_ptr<SumWork> make_sparse(const at::Tensor& gradient, SendOptions options, const at::Tensor& side_values);

 private:
  Teams& teams_for(const SendOptions& options) { return options.scatter ? options.scatter->teams : teams_; }
  SumMemory& memory_for(const SendOptions& options) {
    return options.scatter && options.scatter->memory ? *options.scatter->memory : memory_;
  }
  bool uses_shared_memory(const Teams& teams, const SendOptions& options) const;
  PlanKey plan_key(const FlatGradients& gradients, const SendOptions& options, const Teams& teams) const;
  void choose_plan(const FlatGradients& gradients, const SendOptions& options, SumMemory& memory);
  void check_may_shard(const PlanKey& key, const SendOptions& options) const;
  std::unique_ptr<SumWork> make_low_rank(FlatGradients gradients, SendOptions options);
  std::unique_ptr<SumWork> make_by_memory(FlatGradients gradients, const SendOptions& options, SumMemory& memory);

  Teams teams_;
  const at::Tensor stats_;
  const std::shared_ptr<Workspace> workspace_;
  const std::shared_ptr<BucketTotals> totals_;
  double mean_factor_ = 1.0;
  int64_t num_micro_batches_ = 0;  // 0 if ranks have gradients, and not sums over micro-batches
  SumMemory memory_;
  std::optional<Compression> planned_for_;  // the newest plan's compression; none until the plan has its memory
  LowRankState low_rank_;
  BucketShards shards_;
};

}  // namespace fastsync
