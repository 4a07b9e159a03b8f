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

std::string who_is_missing(Whereabouts& whereabouts) {
  const std::string told = whereabouts.roll_call();
  const auto says = [&](const char* text) { return told.find(text) != std::string::npos; };
  if (!says(": in no sync") && !says("has let go of its engines") && !says(": no answer")) {
    return told;
  }
  const char* const join = says("of the engine of parameter") ? "with sync.join():"
                           : says("of a DDP hook")            ? "with Join([ddp_model]):"
                                                              : nullptr;
  return join == nullptr ? told
                         : c10::str(told, ". Where ranks have different numbers of batches, put the training loop ",
                                    "inside `", join, "`");
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

// What goes wrong on the way is the world's doing: said with bucket and rank, why, and who is missing.
struct BucketSync::Failure {
  std::string beginning;
  std::shared_ptr<Whereabouts> whereabouts;

  [[noreturn]] void raise(const std::string& why) const {
    TORCH_CHECK(false, beginning, why, who_is_missing(*whereabouts));
  }

  template <class Call>
  void guard(const Call& call) const {
    try {
      call();
    } catch (const c10::ValueError&) {
      throw;
    } catch (const c10::Error& error) {
      raise(error.what_without_backtrace());
    } catch (const std::exception& error) {
      raise(error.what());
    }
  }
};

struct BucketSync::Flight {
  Flight() = default;
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  ~Flight() {
    if (sum) {
      BucketSum::abandon(std::move(sum));
    }
  }

  std::unique_ptr<BucketSum> sum;
  OnFlags on_flags;
  std::shared_ptr<const Failure> failure;
  bool ends_step = false;
  std::shared_ptr<Stopwatch> stopwatch;
  std::shared_ptr<BucketTotals> totals;
  std::shared_ptr<const HostCopies> copies;  // null where gradients stay where they are
};

BucketSync::BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
                       std::shared_ptr<Whereabouts> whereabouts)
    : device_of_gradients_(device),
      device_(device_of_sums(*group, device)),
      team_(make_team(std::move(group), device_)),
      may_share_(team_->sends_at_once() && team_->size() > 1),
      failure_(std::make_shared<const Failure>(
          c10::str("fastsync: averaging ", name, " failed on rank ", team_->rank(), " of ", team_->size(), ": "),
          std::move(whereabouts))),
      feedback_(team_->size()),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device_))),
      workspace_(new_workspace(device_)) {
  totals_->kernels = kernels_on(device_.type());
}

// A thread of the process group's may be about to let go of tensors that Python knows, for which it takes the GIL. Who
// ends the group waits for the thread, torch's Reducer with the GIL: so until then it does not end.
BucketSync::~BucketSync() {
  if (newest_ && !newest_->expired() && device_.is_cpu() && getpid() == process_id_) {
    wait_in_background([group = team_->group(), newest = std::move(*newest_)] {
      while (!newest.expired()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
  }
}

// ---- send -----------------------------------------------------------------------------------------------------------

std::shared_ptr<BucketSync::Flight> BucketSync::send(std::vector<at::Tensor> grads, const Sync& sync,
                                                     std::shared_ptr<Stopwatch> stopwatch, const Extras& extras,
                                                     const std::vector<bool>& stand_in) {
  const WithoutPythonObjects without_python;
  return start(bucket_of(std::move(grads), sync), sync, std::move(stopwatch), extras, stand_in,
               /*is_for_future=*/false);
}

std::shared_ptr<BucketSync::Flight> BucketSync::send_by(const MakeSum& make, at::Tensor values, const Sync& sync,
                                                        std::shared_ptr<Stopwatch> stopwatch) {
  TORCH_CHECK_VALUE(!is_elsewhere(), "fastsync: the gradients are on ", device_of_gradients_, ", where the process ",
                    "group does not work, and a reduce-scatter is not taken to the host; use NCCL");
  const WithoutPythonObjects without_python;
  return start(bucket_of({std::move(values)}, sync), sync, std::move(stopwatch), {}, {}, /*is_for_future=*/false, make);
}

Bucket BucketSync::bucket_of(std::vector<at::Tensor> grads, const Sync& sync) {
  if (is_elsewhere()) {
    copies_ = std::make_shared<const HostCopies>(grads, host_memory_);
    grads = copies_->on_host();
  }
  const DType wire = wire_dtype(sync.compression.wire, dtype_of(grads.front().scalar_type()));
  Bucket bucket(std::move(grads), wire, device_);
  bucket.is_lossless = sync.compression.wire == Wire::kNone;
  bucket.mean_factor = mean_factor_;
  bucket.weight = sync.weight;
  if (sync.is_weighted_mean) {  // one rank may count for almost all of the mean, so more than it may not travel
    bucket.multiplier = 1.0 / static_cast<double>(team_->size());
    bucket.rows_add_up = true;
  }
  bucket.stats = stats_;
  bucket.workspace = workspace_;
  return bucket;
}

std::shared_ptr<BucketSync::Flight> BucketSync::start(Bucket bucket, const Sync& sync,
                                                      std::shared_ptr<Stopwatch> stopwatch, const Extras& extras,
                                                      const std::vector<bool>& stand_in, bool is_for_future,
                                                      const MakeSum& make) {
  bucket.extras = extras;
  failure_->whereabouts->average(sync.step);
  if (needs_scale(sync.compression)) {
    agree_on_scale(bucket);
  } else if (sync.compression.wire != Wire::kFloat16) {
    scale_.reset();  // it does not follow the gradients while another wire is in use
  }
  if (!make) {
    failure_->guard([&] { share_memory(bucket, sync.compression); });
  }
  stopwatch->mark(Mark::kStart);
  bucket.scale = scale_;
  bucket.rounding = rounding_of(sync);
  bucket.step = bucket.rounding.is_stochastic ? counter_ : at::Tensor();
  totals_->elements = numel_of(bucket.grads);
  totals_->num_syncs += 1;
  auto flight = std::make_shared<Flight>();
  failure_->guard([&] {
    auto sum = make ? make(std::move(bucket)) : make_sum(std::move(bucket), sync, is_for_future);
    const bool error_feedback = sync.compression.error_feedback;
    feedback_.lend(sum->bucket(), error_feedback, error_feedback ? sum->owned() : Owned(), stand_in);
    sum->send();
    flight->sum = std::move(sum);
    if (flight->sum->failed_to_send()) {
      buffers_.layout.clear();  // beside the gradients there are no zeros any more
    }
  });
  stopwatch->mark(Mark::kSent);
  flight->failure = failure_;
  flight->ends_step = sync.ends_step;
  flight->stopwatch = std::move(stopwatch);
  flight->totals = totals_;
  flight->copies = std::exchange(copies_, nullptr);
  return flight;
}

// Once, for whatever the bucket travels as, or anew where it takes more: all ranks do so in the same sync.
void BucketSync::share_memory(const Bucket& bucket, const Compression& compression) {
  if (!may_share_) {
    return;
  }
  if (!host_) {
    host_ = Host::of(team_->group());
    hosts_ = host_->hosts().empty() ? Levels() : levels_of(*team_, host_->hosts());
  }
  const int64_t stamp = 2 * team_->size() * static_cast<int64_t>(sizeof(float));  // which not every sync has room for
  const int64_t bytes =
      stamp + (hosts_.num_nodes > 1 ? most_bytes(bucket, hosts_, adds_hosts_at_once(bucket, compression))
                                    : most_bytes(bucket, team_->size()));
  if (shared_ && bytes - stamp <= shared_->region_bytes()) {
    return;
  }
  shared_buffers_ = {};
  hosts_.node.reset();
  shared_.reset();
  shared_ = SharedTeam::make(team_->group(), host_, round_up(bytes, kRegionAlignment), totals_->why_not_shared);
  may_share_ = shared_ != nullptr;
  hosts_.node = shared_;
}

// Between hosts.
bool BucketSync::adds_hosts_at_once(const Bucket& bucket, const Compression& compression) const {
  const int64_t numel = numel_of(bucket.grads);
  return rank_sum_for(compression, bucket.grad_dtype, numel, hosts_.num_nodes) == Algorithm::kOneShot;
}

// Whoever names all_reduce means the process group, and whoever names nodes those, which may be the hosts.
std::shared_ptr<Team> BucketSync::team_for(const Compression& compression) const {
  if (!shared_ || compression.algorithm == Algorithm::kAllReduce) {
    return team_;
  }
  const int64_t ranks_per_node = compression.ranks_per_node;
  return ranks_per_node == 1 || host_->hosts() == nodes_of(ranks_per_node, team_->size()) ? shared_ : team_;
}

std::unique_ptr<BucketSum> BucketSync::make_sum(Bucket bucket, const Sync& sync, bool is_for_future) {
  const auto team = team_for(sync.compression);
  SumBuffers& buffers = team == team_ ? buffers_ : shared_buffers_;
  totals_->shares_memory = team->shares_memory();
  totals_->num_hosts = hosts_.num_nodes;
  team->begin(sync.attempt);
  const bool is_across_hosts = team->size() < team_->size();
  const auto algorithm = is_across_hosts ? Algorithm::kTwoLevel
                                         : algorithm_for(sync.compression, bucket.grad_dtype, totals_->elements, *team);
  if (algorithm == Algorithm::kAllReduce) {
    return all_reduce_sum(team, std::move(bucket), buffers, is_for_future);
  }
  Plan plan = [&] {
    if (algorithm != Algorithm::kTwoLevel) {
      return (algorithm == Algorithm::kOneShot ? one_shot : two_shot)(team, sync.tag, bucket);
    }
    const Levels levels =
        is_across_hosts ? hosts_ : levels_of(*team, nodes_of(sync.compression.ranks_per_node, team->size()));
    return two_level(levels, sync.tag, is_across_hosts && adds_hosts_at_once(bucket, sync.compression), bucket);
  }();
  return planned_sum(std::move(plan), std::move(bucket), buffers);
}

bool BucketSync::has_room(const std::vector<at::Tensor>& grads, const Compression& compression) const {
  const DType dtype = dtype_of(grads.front().scalar_type());
  return algorithm_for(compression, dtype, numel_of(grads), *team_for(compression)) != Algorithm::kAllReduce ||
         !is_own_wire(grads, wire_dtype(compression.wire, dtype));
}

// The step is counted on the device, for a CUDA graph repeats what the host has said: it would round alike in every
// replay. The host sets it only where the bucket's steps do not follow each other, as after loading a state, and never
// in a graph, each replay of which would set it anew.
Rounding BucketSync::rounding_of(const Sync& sync) {
  if (!sync.compression.is_stochastic) {
    return {};
  }
  if (is_capturing(device_)) {
    TORCH_CHECK(counter_.defined(), "fastsync: the counter that stochastic rounding follows cannot be made while a ",
                "CUDA graph is captured: take a step like this one before");
  } else if (!counter_.defined()) {
    counter_ = at::full({1}, sync.step, at::TensorOptions().dtype(at::kLong).device(device_));
  } else if (next_counted_ != sync.step) {
    counter_.fill_(sync.step);
  }
  next_counted_ = sync.step + 1;
  const uint64_t seed = fingerprint(c10::str(sync.index, " ", team_->rank()));
  return {/*is_stochastic=*/true, seed, counter_.const_data_ptr<int64_t>()};
}

// ---- receive --------------------------------------------------------------------------------------------------------

void BucketSync::check_sent(const Flight& flight) {
  flight.failure->guard([&] { flight.sum->check_sent(); });
}

// Whoever comes late finds nothing, and holds nothing.
void BucketSync::drive_later(const std::shared_ptr<Flight>& flight, Strand& strand) const {
  if (flight->sum->needs_driving()) {
    strand.post(device_, [weak = std::weak_ptr(flight)] {
      if (const auto driven = weak.lock()) {
        driven->sum->drive();
      }
    });
  }
}

void BucketSync::receive(Flight& flight) {
  flight.failure->guard([&] {
    flight.sum->finish([&] { flight.stopwatch->mark(Mark::kReduced); });
    if (flight.copies) {
      flight.copies->bring_back();
    }
  });
  flight.totals->wire_bytes.add(flight.sum->sent_bytes());
  flight.stopwatch->mark(Mark::kDone);
  if (flight.ends_step) {
    flight.failure->whereabouts->rest();
  }
  if (flight.on_flags && flight.sum->bucket().extras.flags.defined()) {
    flight.on_flags(flight.sum->extras().flags);
  }
}

bool BucketSync::has_error_feedback(const Flight& flight) { return flight.sum->bucket().keeps_losses; }

const Extras& BucketSync::extras(const Flight& flight) { return flight.sum->extras(); }

void BucketSync::discard(Flight& flight) {
  Bucket& bucket = flight.sum->bucket();
  std::vector<at::Tensor> nowhere;
  for (const at::Tensor& grad : bucket.grads) {
    nowhere.push_back(at::empty_like(grad));
  }
  bucket.redirect(std::move(nowhere));
  flight.copies.reset();
  receive(flight);
}

// With the thread's state, for without it a profiler would not see what happens on another thread.
c10::intrusive_ptr<Future> BucketSync::sync(const at::Tensor& buffer, std::vector<at::Tensor> grads, const Sync& sync,
                                            std::shared_ptr<Stopwatch> stopwatch, Strand& strand, const Extras& extras,
                                            OnFlags on_flags, std::function<void()>* rest) {
  const WithoutPythonObjects without_python;
  const auto flight = start(bucket_of(std::move(grads), sync), sync, std::move(stopwatch), extras, {},
                            /*is_for_future=*/!is_elsewhere());
  flight->on_flags = std::move(on_flags);
  if (const auto over = is_elsewhere() ? Reduction::Future() : flight->sum->when_over()) {
    newest_.emplace(over);
    return over->then(at::wrapPropagateTLSState([flight, buffer, sender = std::this_thread::get_id()](Future& reduced) {
                        if (reduced.hasError()) {
                          flight->failure->raise(reduced.tryRetrieveErrorMessage());
                        }
                        std::optional<SingleThreaded> beside_backward;
                        if (std::this_thread::get_id() != sender) {
                          beside_backward.emplace();
                        }
                        // The backend keeps the wire until somebody has waited for the work itself.
                        receive(*flight);
                        return c10::IValue(buffer);
                      }),
                      c10::TensorType::get());
  }
  auto future = make_future(device_of_gradients_);
  auto complete = [flight, buffer, future] {
    try {
      receive(*flight);
      check_sent(*flight);
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
  if (flight->sum->needs_driving()) {
    strand.post(device_, at::wrapPropagateTLSState([flight] { flight->sum->drive(); }), /*is_urgent=*/true);
  }
  strand.post(device_, at::wrapPropagateTLSState(std::move(complete)));
  return future;
}

// ---- the scale and the statistics -----------------------------------------------------------------------------------

// After zeros, or nothing finite, the scale may be anything. Where it takes a wait for the device to know that, it
// rises step by step instead, see next_bucket_scale.
bool BucketSync::has_lost_scale() const {
  const double* stats = readable(stats_);
  return stats != nullptr && totals_->num_syncs > 0 && stats[kMaxMagnitude] == 0.0;
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
  failure_->guard([&] { team_->all_reduce({largest}, c10d::ReduceOp::MAX)->wait_for_rows(); });
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
