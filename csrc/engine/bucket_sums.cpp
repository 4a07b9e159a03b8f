#include "engine/bucket_sums.h"

#include <ATen/ATen.h>

#include <utility>

#include "passes/cuda_graphs.h"
#include "sums/all_reduce_sum.h"
#include "sums/plan.h"
#include "sums/sparse_sum.h"

namespace fastsync {

namespace {

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

}  // namespace

BucketSums::BucketSums(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, at::Tensor stats,
                       std::shared_ptr<Workspace> workspace, std::shared_ptr<BucketTotals> totals)
    : teams_(std::move(group), device),
      stats_(std::move(stats)),
      workspace_(std::move(workspace)),
      totals_(std::move(totals)) {}

FlatGradients BucketSums::flatten(std::vector<at::Tensor> grads, const SendOptions& options,
                                  const at::Tensor& side_values) const {
  const c10::Device device = teams_.all()->device();
  const DType wire = options.compression.wire_dtype(dtype_of(grads.front().scalar_type()));
  FlatGradients gradients(std::move(grads), wire, device, options.shards ? kPieceValues : 1);
  gradients.side_values = side_values;
  gradients.output = options.scatter ? options.scatter->output : at::Tensor();
  gradients.mean_factor = mean_factor_;
  gradients.most_in_tree = num_micro_batches_;
  gradients.weight = options.weight;
  if (options.is_weighted_mean) {  // one rank may count for almost all of the mean, so no more than that may travel
    gradients.multiplier = 1.0 / static_cast<double>(teams_.all()->size());
  }
  gradients.stats = stats_;
  gradients.needs_stats = options.needs_stats || is_capturing(device);  // a graph's replays have what it captures
  gradients.workspace = workspace_;
  return gradients;
}

// ---- the plan -------------------------------------------------------------------------------------------------------

// Whether ranks add in shared memory, unless they have found out that they cannot. They do not if the compression names
// nodes that are no hosts. Nor do they between hosts if they scatter, or if they add by a tree, which has one level.
bool BucketSums::uses_shared_memory(const Teams& teams, const SendOptions& options) const {
  const int64_t ranks_per_node = options.compression.ranks_per_node;
  const bool has_one_level = options.scatter || num_micro_batches_ > 0;
  return options.may_share_memory() && teams.can_share() && !(has_one_level && teams.num_hosts() > 1) &&
         (ranks_per_node == 1 || teams.hosts_have(ranks_per_node));
}

PlanKey BucketSums::plan_key(const FlatGradients& gradients, const SendOptions& options, const Teams& teams) const {
  const Compression& compression = options.compression;
  const int64_t numel = numel_of(gradients.grads);
  const bool is_shared = uses_shared_memory(teams, options);
  const bool is_across_hosts = is_shared && teams.num_hosts() > 1;
  return {.algorithm = options.scatter ? Algorithm::kReduceScatter
                       : is_across_hosts
                           ? Algorithm::kTwoLevel
                           : algorithm_for(compression, gradients.grad_dtype, numel, *teams.all(), is_shared,
                                           /*ranks_add=*/options.shards != nullptr || num_micro_batches_ > 0),
          .between_nodes = is_across_hosts ? rank_sum_for(compression, gradients.grad_dtype, numel, teams.num_hosts())
                                           : Algorithm::kTwoShot,
          .ranks_per_node = compression.ranks_per_node,
          .shares_memory = is_shared,
          .region_bytes = is_shared && teams.shared() ? teams.shared()->region_bytes() : 0,
          .tag = options.tag,
          .grad_dtype = gradients.grad_dtype,
          .wire_dtype = gradients.wire_dtype,
          .num_values = options.scatter ? options.scatter->output.numel() : gradients.num_values,
          .side_bytes = gradients.side_bytes(),
          .keeps_shard = options.shards != nullptr,
          .rows_add_up = options.is_weighted_mean || num_micro_batches_ > 0,
          .factor = options.scatter ? options.scatter->factor : mean_factor_};
}

// A LowRankSum has two plans, which are chosen once its factors are there.
void BucketSums::choose_plan(const FlatGradients& gradients, const SendOptions& options) {
  if (options.compression.low_rank == 0) {
    low_rank_ = LowRankState();
    choose_plan(gradients, options, memory_for(options));
  }
}

// Makes a new plan if the key has changed. If it needs more shared memory than there is, all ranks make room in the
// same send, or find out that they cannot share memory.
void BucketSums::choose_plan(const FlatGradients& gradients, const SendOptions& options, SumMemory& memory) {
  Teams& teams = teams_for(options);
  const int64_t num_hosts = teams.hosts().num_nodes;
  PlanKey key = plan_key(gradients, options, teams);
  if (memory.key != key) {
    planned_for_.reset();
    if (key.shares_memory && !teams.has_room(make_plan(key, teams).bytes)) {
      memory = SumMemory();  // because it belongs to the shared memory that there is now
      teams.make_room(make_plan(with_room_for_side_values(key), teams).bytes);
      key = plan_key(gradients, options, teams);
    }
    if (options.shards) {
      check_may_shard(key, options);  // before the key stays, so that the next send is refused as well
    }
    const bool has_plan = key.algorithm != Algorithm::kAllReduce;
    memory.plan = has_plan ? std::make_shared<const Plan>(make_plan(key, teams)) : nullptr;
    memory.key = key;
    if (options.shards) {
      shards_.make(*memory.plan, gradients);
    }
    if (!options.scatter) {
      memory.buffer.reset();  // because another plan has left bytes where gaps between gradients must be zero
    }
  }
  if (planned_for_ != options.compression) {
    stats_.select(0, kNumSaturated).zero_();  // because a sum that needs no packing does not write it
  }
  planned_for_ = options.compression;
  totals_->shares_memory = key.shares_memory;
  totals_->num_hosts = key.shares_memory ? num_hosts : 1;
  totals_->why_not_shared =
      options.scatter && num_hosts > 1 ? c10::str("its ranks are on ", num_hosts, " hosts") : teams.why_not_shared();
}

void BucketSums::check_may_shard(const PlanKey& key, const SendOptions& options) const {
  TORCH_CHECK(key.shares_memory || key.algorithm != Algorithm::kTwoLevel,
              "shard_optimizer takes a ranks_per_node that is the number of ranks of each host; leave one of them out");
  TORCH_CHECK(key.shares_memory == options.may_share_memory(),
              "shard_optimizer needs sums in shared memory, and there are none any more",
              teams_.why_not_shared().empty() ? "" : ", because " + teams_.why_not_shared());
}

// ---- the sums -------------------------------------------------------------------------------------------------------

std::unique_ptr<SumWork> BucketSums::make(FlatGradients gradients, const SendOptions& options) {
  totals_->numel = numel_of(gradients.grads);
  if (options.shards) {
    gradients.output = shards_.means();
  }
  return options.compression.low_rank > 0 ? make_low_rank(std::move(gradients), options)
                                          : make_by_memory(std::move(gradients), options, memory_for(options));
}

// A LowRankSum has multiplied the gradients by the weight before it makes its sums.
std::unique_ptr<SumWork> BucketSums::make_low_rank(FlatGradients gradients, SendOptions options) {
  TORCH_CHECK(!options.shards, "shard_optimizer keeps shards of the means, and lowrank needs whole matrices; ",
              "leave one of them out");
  TORCH_CHECK(!is_capturing(gradients.device), "a CUDA graph cannot hold a step with lowrank; capture with int8 and ",
              "error feedback, or train without the graph");
  options.weight.reset();
  options.in_place = false;
  return std::make_unique<LowRankSum>(
      std::move(gradients), low_rank_, options.compression.low_rank,
      [this, options](std::vector<at::Tensor> values, SumMemory& memory, const at::Tensor& side_values) {
        FlatGradients flat = flatten(std::move(values), options, side_values);
        choose_plan(flat, options, memory);
        return make_by_memory(std::move(flat), options, memory);
      });
}

// A step may have two sums, so their numbers are those of half steps.
std::unique_ptr<SumWork> BucketSums::make_by_memory(FlatGradients gradients, const SendOptions& options,
                                                    SumMemory& memory) {
  if (!memory.plan) {
    return std::make_unique<AllReduceSum>(std::move(gradients), teams_.all(), memory.buffer,
                                          /*is_lossless=*/!options.compression.wire, options.in_place);
  }
  SumNumber number = options.number;
  if (number.step_count > 0) {
    number.step_count = 2 * number.step_count + (&memory == &low_rank_.of_right ? 1 : 0);
  }
  auto sum = std::make_unique<PlannedSum>(std::move(gradients), memory, number);
  if (options.scatter && !options.scatter->memory) {
    memory.buffer.reset();  // the device's allocator keeps it for the next bucket, in the order of streams
  }
  return sum;
}

// Other rows come in each step, so neither residuals nor a scale last from step to step. Only wires of single values
// carry them.
std::unique_ptr<SumWork> BucketSums::make_sparse(const at::Tensor& gradient, SendOptions options,
                                                 const at::Tensor& side_values) {
  TORCH_CHECK(!is_capturing(gradient.device()), "fastsync: a CUDA graph cannot hold a step with sparse gradients; use ",
              "sparse=False in the embedding, or train without the graph");
  const std::optional<DType> wire = options.compression.wire;
  options.compression = Compression();
  if (wire && unit_of(*wire).values == 1) {
    options.compression.wire = wire;
  }
  const at::Tensor coalesced = gradient.coalesce();
  FlatGradients values = flatten({coalesced._values().contiguous()}, options, side_values);
  totals_->is_sparse = true;
  totals_->numel = numel_of(values.grads);
  return std::make_unique<SparseSum>(std::move(values), coalesced._indices().select(0, 0).contiguous(), gradient,
                                     teams_.all(), options.tag, options.has_failed);
}

}  // namespace fastsync
