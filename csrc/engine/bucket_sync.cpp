#include "engine/bucket_sync.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <utility>

#include "passes/aten/passes.h"
#include "passes/backend.h"
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

// If the compression names nodes, hosts add up together only if they are those nodes.
std::shared_ptr<Team> team_for(const Teams& teams, const Compression& compression) {
  const int64_t ranks_per_node = compression.ranks_per_node;
  const bool is_of_hosts = teams.shared() && (ranks_per_node == 1 || teams.hosts_have(ranks_per_node));
  return is_of_hosts ? teams.shared() : teams.all();
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
  guard([&] { share_memory(bucket, sync); });
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
    bucket.rows_add_up = true;
  }
  bucket.stats = stats_;
  bucket.workspace = workspace_;
  return bucket;
}

// The memory has room for the bucket in any wire format. All ranks do this in the same sync.
void BucketSync::share_memory(const Bucket& bucket, const Sync& sync) {
  Teams& teams = sync.scatter ? sync.scatter->teams : teams_;
  const Levels& hosts = teams.hosts();
  const bool is_across_hosts = hosts.num_nodes > 1;
  if (is_across_hosts && sync.scatter) {
    totals_->why_not_shared = c10::str("its ranks are on ", hosts.num_nodes, " hosts");
    return;
  }
  const int64_t bytes = is_across_hosts ? most_bytes(bucket, hosts, adds_hosts_at_once(bucket, sync.compression))
                                        : most_bytes(bucket, teams.all()->size());
  if (!teams.has_room(bytes)) {
    // The memory of sums lies in the shared memory that there is now.
    (sync.scatter ? sync.scatter->memory : memory_) = SumMemory();
    teams.make_room(bytes);
  }
  totals_->why_not_shared = teams.why_not_shared();
}

// Whether hosts add up in one exchange, and not in two.
bool BucketSync::adds_hosts_at_once(const Bucket& bucket, const Compression& compression) const {
  const int64_t numel = numel_of(bucket.grads);
  return rank_sum_for(compression, bucket.grad_dtype, numel, teams_.num_hosts()) == Algorithm::kOneShot;
}

// A plan is made anew if anything changes that it follows from. New shared memory has no plan yet.
std::unique_ptr<BucketSum> BucketSync::make_sum(Bucket bucket, const Sync& sync) {
  Teams& teams = sync.scatter ? sync.scatter->teams : teams_;
  const auto team = team_for(teams, sync.compression);
  const bool is_shared = team->shares_memory();
  totals_->shares_memory = is_shared;
  totals_->num_hosts = is_shared ? teams.num_hosts() : 1;
  if (sync.scatter) {
    team->begin(sync.attempt, agreement->number);
    sync.scatter->memory.plan =
        std::make_shared<const Plan>(reduce_scatter(team, sync.tag, bucket, sync.scatter->factor));
    return std::make_unique<BucketSum>(std::move(bucket), sync.scatter->memory);
  }
  team->begin(sync.attempt);
  const bool is_across_hosts = team->size() < teams.all()->size();
  const bool at_once = is_across_hosts && adds_hosts_at_once(bucket, sync.compression);
  const auto algorithm = is_across_hosts ? Algorithm::kTwoLevel
                                         : algorithm_for(sync.compression, bucket.grad_dtype, totals_->elements, *team);
  if (algorithm == Algorithm::kAllReduce) {  // what is lossless saturates nowhere
    bucket.multiplier = 1.0 / static_cast<double>(team->size());
    const bool is_lossless = !sync.compression.wire;
    bucket.limit = saturation_limit(is_lossless ? DType::kFloat64 : bucket.wire_dtype, team->size());
  }
  const PlanKey key{.algorithm = algorithm,
                    .is_shared = is_shared,
                    .at_once = at_once,
                    .in_place = sync.in_place,
                    .rows_add_up = bucket.rows_add_up,
                    .grad_dtype = bucket.grad_dtype,
                    .wire_dtype = bucket.wire_dtype,
                    .tag = sync.tag,
                    .ranks_per_node = sync.compression.ranks_per_node,
                    .num_values = bucket.num_values,
                    .num_gradients = bucket.grads.size(),
                    .side_bytes = bucket.side_bytes(),
                    .mean_factor = bucket.mean_factor};
  if (memory_.key != key) {
    Plan plan = [&] {
      switch (algorithm) {
        case Algorithm::kAllReduce:
          return all_reduce(team, bucket, sync.in_place);
        case Algorithm::kOneShot:
          return one_shot(team, sync.tag, bucket);
        case Algorithm::kTwoShot:
          return two_shot(team, sync.tag, bucket);
        case Algorithm::kTwoLevel:
          const Levels levels = is_across_hosts
                                    ? teams.hosts()
                                    : levels_of(*team, nodes_of(sync.compression.ranks_per_node, team->size()));
          return two_level(levels, sync.tag, at_once, bucket);
      }
      TORCH_INTERNAL_ASSERT(false);
    }();
    memory_ = {std::make_shared<const Plan>(std::move(plan)), key};
  }
  return std::make_unique<BucketSum>(std::move(bucket), memory_);
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
