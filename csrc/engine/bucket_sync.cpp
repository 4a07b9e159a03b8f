#include "engine/bucket_sync.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <utility>

#include "passes/aten/passes.h"
#include "passes/backend.h"
#include "sums/all_reduce_sum.h"
#include "sums/plan.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

// Whether ranks add in shared memory, until they find out that they cannot. They do not if the compression names nodes
// that are no hosts.
bool uses_shared_memory(const Teams& teams, const Sync& sync) {
  const int64_t ranks_per_node = sync.compression.ranks_per_node;
  const bool is_across_hosts = teams.num_hosts() > 1;
  return teams.can_share() && !(sync.scatter && is_across_hosts) &&
         (ranks_per_node == 1 || teams.hosts_have(ranks_per_node));
}

// The ranks of this host if they add in shared memory, else all ranks. A single host has the same ranks before there is
// room in its memory.
std::shared_ptr<Team> team_for(const PlanKey& key, const Teams& teams) {
  return key.shares_memory && teams.shared() ? teams.shared() : teams.all();
}

// Two levels are the hosts if ranks share memory, else the nodes that the compression names.
Plan plan_for(const PlanKey& key, Teams& teams) {
  if (key.algorithm != Algorithm::kTwoLevel) {
    return make_plan(key, team_for(key, teams));
  }
  const Team& all = *teams.all();
  return make_plan(key, key.shares_memory ? teams.hosts() : levels_of(all, nodes_of(key.ranks_per_node, all.size())));
}

}  // namespace

// ---- a bucket of a step under way
// ----------------------------------------------------------------------------------------------

BucketWork::~BucketWork() {
  if (sum_) {
    BucketSum::abandon(std::move(sum_));
  }
}

// If the work is gone by then, the task does nothing. It takes this thread's state along, so that a profiler sees what
// happens on the other thread.
void BucketWork::drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress) {
  if (work->sum_->needs_driving()) {
    const WithoutPythonObjects without_python;
    progress.post(work->sync_->device(), at::wrapPropagateTLSState([weak = std::weak_ptr(work)] {
                    if (const auto driven = weak.lock()) {
                      driven->sum_->drive();
                    }
                  }),
                  /*is_urgent=*/true);
  }
}

void BucketWork::receive() {
  sync_->guard([&] { sum_->finish([&] { stopwatch_->mark(Mark::kReduced); }); });
  sync_->totals_->wire_bytes += sum_->sent_bytes();
  stopwatch_->mark(Mark::kDone);
}

void BucketWork::discard() {
  sum_->bucket().redirect();
  receive();
}

// ---- send -----------------------------------------------------------------------------------------------------------

BucketSync::BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
                       std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters,
                       std::shared_ptr<Agreement> agreement)
    : parameters(std::move(parameters)),
      agreement(std::move(agreement)),
      device_(device),
      teams_(std::move(group), device_),
      failure_(c10::str("fastsync: averaging ", name, " failed on rank ", teams_.all()->rank(), " of ",
                        teams_.all()->size(), ": ")),
      liveness_(std::move(liveness)),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device_))),
      workspace_(new_workspace(device_)) {
  totals_->kernels = kernels_on(device_.type());
}

std::shared_ptr<BucketWork> BucketSync::send(std::vector<at::Tensor> grads, const Sync& sync,
                                             std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                             const std::vector<bool>& stand_in) {
  const WithoutPythonObjects without_python;
  Bucket bucket = make_bucket(std::move(grads), sync, side_values);
  liveness_->average(sync.step);
  if (needs_scale(sync.compression)) {
    agree_on_scale(bucket);
  } else if (sync.compression.wire != DType::kFloat16) {
    scale_.reset();  // it does not follow the gradients while another wire is in use
  }
  guard([&] { choose_plan(bucket, sync); });
  stopwatch->mark(Mark::kStart);
  bucket.scale = scale_;
  totals_->elements = numel_of(bucket.grads);
  totals_->num_syncs += 1;
  has_followed_ = true;
  auto work = std::make_shared<BucketWork>();
  guard([&] {
    auto sum = make_sum(std::move(bucket), sync);
    if (sync.compression.error_feedback) {
      feedback_.lend(sum->bucket(), stand_in);
    } else {
      feedback_ = ErrorFeedback();
    }
    TORCH_CHECK(!is_half_sent_, "it has failed before, while it was sent, so the ranks no longer meet in one message: ",
                "begin anew with another process group");
    is_half_sent_ = !sum->may_be_sent_again();
    sum->send();
    is_half_sent_ = false;
    work->sum_ = std::move(sum);
  });
  stopwatch->mark(Mark::kSent);
  work->sync_ = shared_from_this();
  work->stopwatch_ = std::move(stopwatch);
  return work;
}

Bucket BucketSync::make_bucket(std::vector<at::Tensor> grads, const Sync& sync, const at::Tensor& side_values) {
  const DType wire = sync.compression.wire_dtype(dtype_of(grads.front().scalar_type()));
  Bucket bucket(std::move(grads), wire, device_);
  bucket.side_values = side_values;
  bucket.output = sync.scatter ? sync.scatter->output : at::Tensor();
  bucket.mean_factor = mean_factor_;
  bucket.weight = sync.weight;
  if (sync.is_weighted_mean) {  // one rank may count for almost all of the mean, so no more than that may travel
    bucket.multiplier = 1.0 / static_cast<double>(teams_.all()->size());
  }
  bucket.stats = stats_;
  bucket.workspace = workspace_;
  return bucket;
}

PlanKey BucketSync::plan_key(const Bucket& bucket, const Sync& sync, const Teams& teams) const {
  const Compression& compression = sync.compression;
  const int64_t numel = numel_of(bucket.grads);
  const bool is_shared = uses_shared_memory(teams, sync);
  const bool is_across_hosts = is_shared && teams.num_hosts() > 1;
  return {.algorithm = sync.scatter ? Algorithm::kReduceScatter
                       : is_across_hosts
                           ? Algorithm::kTwoLevel
                           : algorithm_for(compression, bucket.grad_dtype, numel, *teams.all(), is_shared),
          .between_nodes = is_across_hosts ? rank_sum_for(compression, bucket.grad_dtype, numel, teams.num_hosts())
                                           : Algorithm::kTwoShot,
          .ranks_per_node = compression.ranks_per_node,
          .shares_memory = is_shared,
          .region_bytes = is_shared && teams.shared() ? teams.shared()->region_bytes() : 0,
          .tag = sync.tag,
          .grad_dtype = bucket.grad_dtype,
          .wire_dtype = bucket.wire_dtype,
          .num_values = sync.scatter ? sync.scatter->output.numel() : bucket.num_values,
          .side_bytes = bucket.side_bytes(),
          .rows_add_up = sync.is_weighted_mean,
          .factor = sync.scatter ? sync.scatter->factor : mean_factor_};
}

// A plan is made anew if anything that it follows from has changed. If it needs more shared memory than there is, all
// ranks make room in the same sync, or find out that they cannot share memory.
void BucketSync::choose_plan(const Bucket& bucket, const Sync& sync) {
  Teams& teams = sync.scatter ? sync.scatter->teams : teams_;
  SumMemory& memory = sync.scatter ? sync.scatter->memory : memory_;
  const int64_t num_hosts = teams.hosts().num_nodes;
  PlanKey key = plan_key(bucket, sync, teams);
  if (memory.key != key) {
    planned_for_.reset();
    if (key.shares_memory && !teams.has_room(plan_for(key, teams).bytes)) {
      memory = SumMemory();  // it belongs to the memory that there is now
      teams.make_room(plan_for(with_room_for_side_values(key), teams).bytes);
      key = plan_key(bucket, sync, teams);
    }
    const bool has_plan = key.algorithm != Algorithm::kAllReduce;
    memory.plan = has_plan ? std::make_shared<const Plan>(plan_for(key, teams)) : nullptr;
    memory.key = key;
    if (!sync.scatter) {
      memory.bytes.reset();  // between gradients lies what another plan has left there
    }
  }
  planned_for_ = sync.compression;
  totals_->shares_memory = key.shares_memory;
  totals_->num_hosts = key.shares_memory ? num_hosts : 1;
  totals_->why_not_shared =
      sync.scatter && num_hosts > 1 ? c10::str("its ranks are on ", num_hosts, " hosts") : teams.why_not_shared();
}

std::unique_ptr<BucketSum> BucketSync::make_sum(Bucket bucket, const Sync& sync) {
  SumMemory& memory = sync.scatter ? sync.scatter->memory : memory_;
  const auto team = team_for(*memory.key, sync.scatter ? sync.scatter->teams : teams_);
  team->begin(sync.attempt, sync.scatter ? agreement->number : -1);
  if (memory.plan) {
    return std::make_unique<PlannedSum>(std::move(bucket), memory);
  }
  const bool is_lossless = !sync.compression.wire;  // what is lossless saturates nowhere
  bucket.multiplier = 1.0 / static_cast<double>(team->size());
  bucket.limit = saturation_limit(is_lossless ? DType::kFloat64 : bucket.wire_dtype, team->size());
  return std::make_unique<AllReduceSum>(std::move(bucket), team->group(), memory.bytes, sync.in_place);
}

// ---- the scale and the statistics -----------------------------------------------------------------------------------

// After a sum of zeros, or of nothing finite, the scale may be anything. On a device the host would have to wait to
// know that. There the scale rises step by step instead, see next_bucket_scale.
bool BucketSync::has_lost_scale() const {
  const double* stats = readable(stats_);
  return stats != nullptr && has_followed_ && stats[kMaxMagnitude] == 0.0;
}

// The first scale comes from the gradients themselves: from the largest magnitude over all ranks. That takes one pass
// and one number to reduce. Later scales follow the reduced gradients. All of it happens on the device, and no host
// waits.
void BucketSync::agree_on_scale(const Bucket& bucket) {
  aten::measure(bucket.grads, stats_);
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  if (bucket.weight.defined()) {
    largest.mul_(bucket.weight);
  }
  guard([&] { all_reduce(*teams_.all()->group(), device_, {largest}, c10d::ReduceOp::MAX)->wait_for_rows(); });
  const at::Tensor otherwise =
      scale_.defined() ? scale_ : at::ones({1}, at::TensorOptions().dtype(at::kFloat).device(device_));
  scale_ = at::where(largest > 0, aten::power_of_two(aten::scale_exponent_for(largest)), otherwise);
}

void BucketSync::measure(const std::vector<at::Tensor>& grads) {
  const at::Tensor largest = stats_.select(0, kMaxMagnitude).clone();
  aten::measure(grads, stats_);
  stats_.select(0, kMaxMagnitude).copy_(largest);
}

}  // namespace fastsync
