#include "engine/bucket_sync.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>

#include <chrono>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "passes/aten/passes.h"
#include "passes/backend.h"
#include "sums/plan.h"
#include "transport/agreement.h"
#include "transport/single_threaded.h"
#include "transport/without_python_objects.h"

namespace fastsync {

using c10::ivalue::Future;

const Compression& compression_for(const Schedule& schedule, int64_t step, int64_t numel, c10::Device device) {
  TORCH_CHECK_VALUE(schedule.is_constant() || !is_capturing(device),
                    "fastsync: a CUDA graph repeats the step that it has captured, so compression cannot change from "
                    "step to step in it: set one compression in place of ",
                    schedule.description(), " before capturing, and capture anew to change it");
  return schedule.at(step, numel);
}

namespace {

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

}  // namespace

// ---- one sum under way ----------------------------------------------------------------------------------------------

BucketWork::~BucketWork() {
  if (sum_) {
    BucketSum::abandon(std::move(sum_));
  }
}

void BucketWork::check_sent() const {
  guard(*failure_, *whereabouts_, [&] { sum_->check_sent(); });
}

// Whoever comes late finds nothing, and holds nothing.
void BucketWork::drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress) {
  if (work->sum_->needs_driving()) {
    progress.post(work->sum_->bucket().device, [weak = std::weak_ptr(work)] {
      if (const auto driven = weak.lock()) {
        driven->sum_->drive();
      }
    });
  }
}

void BucketWork::receive() {
  guard(*failure_, *whereabouts_, [&] {
    sum_->finish([&] { stopwatch_->mark(Mark::kReduced); });
    if (copies_) {
      copies_->bring_back();
    }
  });
  totals_->wire_bytes.add(sum_->sent_bytes());
  stopwatch_->mark(Mark::kDone);
  if (ends_step_) {
    whereabouts_->rest();
  }
  if (on_side_values_ && side_values().defined()) {
    on_side_values_(side_values());
  }
}

void BucketWork::discard() {
  sum_->bucket().redirect();
  copies_.reset();
  receive();
}

// ---- send -----------------------------------------------------------------------------------------------------------

BucketSync::BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
                       std::shared_ptr<Whereabouts> whereabouts, std::vector<ParameterId> of_parameters,
                       std::shared_ptr<Agreement> agreed)
    : parameters(std::move(of_parameters)),
      agreement(std::move(agreed)),
      device_of_gradients_(device),
      device_(device_of_sums(*group, device)),
      teams_(std::move(group), device_),
      failure_(std::make_shared<const std::string>(c10::str("fastsync: averaging ", name, " failed on rank ",
                                                            teams_.all()->rank(), " of ", teams_.all()->size(), ": "))),
      whereabouts_(std::move(whereabouts)),
      feedback_(teams_.all()->size()),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device_))),
      workspace_(new_workspace(device_)) {
  totals_->kernels = kernels_on(device_.type());
}

// A thread of the process group's may be about to let go of tensors that Python knows, for which it takes the GIL. Who
// ends the group waits for the thread, torch's Reducer with the GIL: so until then it does not end.
BucketSync::~BucketSync() {
  if (newest_ && !newest_->expired() && device_.is_cpu() && getpid() == process_id_) {
    wait_in_background([group = teams_.all()->group(), newest = std::move(*newest_)] {
      while (!newest.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
}

std::shared_ptr<BucketWork> BucketSync::send(std::vector<at::Tensor> grads, const Sync& sync,
                                             std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                             const std::vector<bool>& stand_in) {
  return start(std::move(grads), sync, std::move(stopwatch), side_values, stand_in, /*is_for_future=*/false);
}

std::shared_ptr<BucketWork> BucketSync::start(std::vector<at::Tensor> grads, const Sync& sync,
                                              std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                              const std::vector<bool>& stand_in, bool is_for_future) {
  const WithoutPythonObjects without_python;
  Bucket bucket = bucket_of(std::move(grads), sync);
  bucket.side_values = side_values;
  whereabouts_->average(sync.step);
  if (needs_scale(sync.compression)) {
    agree_on_scale(bucket);
  } else if (sync.compression.wire != Wire::kFloat16) {
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
    auto sum = sync.scatter ? make_scatter(std::move(bucket), sync) : make_sum(std::move(bucket), sync, is_for_future);
    const bool error_feedback = sync.compression.error_feedback;
    feedback_.lend(sum->bucket(), error_feedback, error_feedback ? sum->owned() : Owned(), stand_in);
    sum->send();
    work->sum_ = std::move(sum);
  });
  stopwatch->mark(Mark::kSent);
  work->failure_ = failure_;
  work->whereabouts_ = whereabouts_;
  work->ends_step_ = sync.ends_step;
  work->stopwatch_ = std::move(stopwatch);
  work->totals_ = totals_;
  work->copies_ = std::exchange(copies_, nullptr);
  return work;
}

Bucket BucketSync::bucket_of(std::vector<at::Tensor> grads, const Sync& sync) {
  if (is_elsewhere()) {
    TORCH_CHECK_VALUE(!sync.scatter, "fastsync: the gradients are on ", device_of_gradients_, ", where the process ",
                      "group does not work, and a reduce-scatter is not taken to the host; use NCCL");
    copies_ = std::make_shared<const HostCopies>(grads, host_memory_);
    grads = copies_->on_host();
  }
  const DType wire = wire_dtype(sync.compression.wire, dtype_of(grads.front().scalar_type()));
  Bucket bucket(std::move(grads), wire, device_);
  bucket.is_lossless = sync.compression.wire == Wire::kNone;
  bucket.mean_factor = mean_factor_;
  bucket.weight = sync.weight;
  if (sync.is_weighted_mean) {  // one rank may count for almost all of the mean, so more than it may not travel
    bucket.multiplier = 1.0 / static_cast<double>(teams_.all()->size());
    bucket.rows_add_up = true;
  }
  bucket.stats = stats_;
  bucket.workspace = workspace_;
  return bucket;
}

// For whatever the bucket travels as. All ranks do so in the same sync.
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
    SumMemory& memory = sync.scatter ? sync.scatter->shared_memory : shared_memory_;
    memory = SumMemory();  // it belongs to the memory that there is now
    teams.make_room(bytes);
  }
  totals_->why_not_shared = teams.why_not_shared();
}

// Between hosts.
bool BucketSync::adds_hosts_at_once(const Bucket& bucket, const Compression& compression) const {
  const int64_t numel = numel_of(bucket.grads);
  return rank_sum_for(compression, bucket.grad_dtype, numel, teams_.num_hosts()) == Algorithm::kOneShot;
}

// Whoever names all_reduce means the process group, and whoever names nodes those, which may be the hosts.
std::shared_ptr<Team> BucketSync::team_for(const Compression& compression) const {
  if (!teams_.shared() || compression.algorithm == Algorithm::kAllReduce) {
    return teams_.all();
  }
  const int64_t ranks_per_node = compression.ranks_per_node;
  return ranks_per_node == 1 || teams_.hosts_have(ranks_per_node) ? teams_.shared() : teams_.all();
}

std::unique_ptr<BucketSum> BucketSync::make_sum(Bucket bucket, const Sync& sync, bool is_for_future) {
  const auto team = team_for(sync.compression);
  SumMemory& memory = team->shares_memory() ? shared_memory_ : memory_;
  totals_->shares_memory = team->shares_memory();
  totals_->num_hosts = teams_.num_hosts();
  team->begin(sync.attempt);
  const bool is_across_hosts = team->size() < teams_.all()->size();
  const auto algorithm = is_across_hosts ? Algorithm::kTwoLevel
                                         : algorithm_for(sync.compression, bucket.grad_dtype, totals_->elements, *team);
  if (algorithm == Algorithm::kAllReduce) {
    return all_reduce_sum(team, std::move(bucket), memory, is_for_future);
  }
  Plan plan = [&] {
    if (algorithm != Algorithm::kTwoLevel) {
      return (algorithm == Algorithm::kOneShot ? one_shot : two_shot)(team, sync.tag, bucket);
    }
    const Levels levels =
        is_across_hosts ? teams_.hosts() : levels_of(*team, nodes_of(sync.compression.ranks_per_node, team->size()));
    return two_level(levels, sync.tag, is_across_hosts && adds_hosts_at_once(bucket, sync.compression), bucket);
  }();
  return planned_sum(std::move(plan), std::move(bucket), memory);
}

std::unique_ptr<BucketSum> BucketSync::make_scatter(Bucket bucket, const Sync& sync) const {
  auto& [output, factor, teams, memory, shared_memory] = *sync.scatter;
  const auto& shared = teams.shared();
  const std::shared_ptr<Team> team = shared ? shared : teams.all();
  totals_->shares_memory = shared != nullptr;
  team->begin(sync.attempt);
  if (shared) {
    shared->announce(agreement->number);
  }
  Plan plan = reduce_scatter(team, sync.tag, bucket, output, factor);
  return planned_sum(std::move(plan), std::move(bucket), shared ? shared_memory : memory);
}

bool BucketSync::has_room(const std::vector<at::Tensor>& grads, const Compression& compression) const {
  const DType dtype = dtype_of(grads.front().scalar_type());
  const DType wire = wire_dtype(compression.wire, dtype);
  return algorithm_for(compression, dtype, numel_of(grads), *team_for(compression)) != Algorithm::kAllReduce ||
         (wire == DType::kFloat32 && !is_own_wire(grads, wire));
}

// With the thread's state, for without it a profiler would not see what happens on another thread.
c10::intrusive_ptr<Future> BucketSync::sync(const at::Tensor& buffer, std::vector<at::Tensor> grads, const Sync& sync,
                                            std::shared_ptr<Stopwatch> stopwatch, ProgressThread& progress,
                                            const at::Tensor& side_values, OnSideValues on_side_values,
                                            std::function<void()>* rest) {
  const WithoutPythonObjects without_python;
  const auto work = start(std::move(grads), sync, std::move(stopwatch), side_values, {},
                          /*is_for_future=*/!is_elsewhere());
  work->on_side_values_ = std::move(on_side_values);
  if (const auto over = is_elsewhere() ? Reduction::Future() : work->sum_->when_over()) {
    newest_.emplace(over);
    return over->then(at::wrapPropagateTLSState([work, buffer, sender = std::this_thread::get_id()](Future& reduced) {
                        if (reduced.hasError()) {
                          raise_failure(*work->failure_, reduced.tryRetrieveErrorMessage(), *work->whereabouts_);
                        }
                        std::optional<SingleThreaded> beside_backward;
                        if (std::this_thread::get_id() != sender) {
                          beside_backward.emplace();
                        }
                        // The backend keeps the wire until somebody has waited for the work itself.
                        work->receive();
                        return c10::IValue(buffer);
                      }),
                      c10::TensorType::get());
  }
  auto future = make_future(device_of_gradients_);
  auto complete = [work, buffer, future] {
    try {
      work->receive();
      work->check_sent();
    } catch (...) {
      future->setError(std::current_exception());
      return;
    }
    future->markCompleted(c10::IValue(buffer));
  };
  if (rest != nullptr && device_.is_cpu()) {
    *rest = std::move(complete);
    return future;
  }
  if (work->sum_->needs_driving()) {
    progress.post(device_, at::wrapPropagateTLSState([work] { work->sum_->drive(); }), /*is_urgent=*/true);
  }
  progress.post(device_, at::wrapPropagateTLSState(std::move(complete)));
  return future;
}

// ---- the scale and the statistics -----------------------------------------------------------------------------------

// After zeros, or nothing finite, the scale may be anything. Where it takes a wait for the device to know that, it
// rises step by step instead, see next_bucket_scale.
bool BucketSync::has_lost_scale() const {
  const double* stats = readable(stats_);
  return stats != nullptr && has_followed_ && stats[kMaxMagnitude] == 0.0;
}

// The first scale comes from the gradients themselves: the largest magnitude over all ranks. One pass and one number to
// reduce, once in a bucket's life unless it gets lost; the scales after follow the reduced gradients. All on the
// device, for no host waits.
void BucketSync::agree_on_scale(const Bucket& bucket) {
  bucket.measure();
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  if (bucket.weight.defined()) {
    largest.mul_(bucket.weight);
  }
  guard([&] { teams_.all()->all_reduce({largest}, c10d::ReduceOp::MAX)->wait_for_rows(); });
  const at::Tensor otherwise =
      scale_.defined() ? scale_ : at::ones({1}, at::TensorOptions().dtype(at::kFloat).device(device_));
  scale_ = at::where(largest > 0, aten::power_of_two(aten::scale_exponent_for(largest)), otherwise);
}

void BucketSync::measure(const std::vector<at::Tensor>& grads) {
  const DType dtype = grads.empty() ? DType::kFloat32 : dtype_of(grads.front().scalar_type());
  std::vector<at::Tensor> measured = grads;
  if (is_elsewhere() && !grads.empty()) {
    measured = HostCopies(grads, host_memory_).on_host();
  }
  const auto segments = lay_out(measured);
  const at::Tensor largest = stats_.select(0, kMaxMagnitude).clone();
  run_measure({segments.data(), static_cast<int64_t>(segments.size()), dtype, stats_.data_ptr<double>()}, device_,
              workspace_);
  stats_.select(0, kMaxMagnitude).copy_(largest);
}

}  // namespace fastsync
