#include "bucket_sync.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "agreement.h"
#include "exchange.h"
#include "fp32_reduce.h"
#include "two_level.h"
#include "without_python_objects.h"

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

// Below so many bytes that each rank sends more than two_shot would, one step of the network costs less than two.
constexpr int64_t kOneShotBytes = 1 << 16;
// Between two ranks both send as much, and full width may go either way: see algorithm_for.
constexpr int64_t kOneShotBytesOfTwo = 1 << 22;

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return at::kFloat;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kInt8:
      return at::kByte;
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

// What is said of a wait that failed: "fastsync: averaging bucket 0 failed on ...", why, and who is missing.
struct BucketSync::Failure {
  std::string beginning;
  std::shared_ptr<Whereabouts> whereabouts;

  [[noreturn]] void raise(const std::string& why) const {
    TORCH_CHECK(false, beginning, why, whereabouts->roll_call());
  }
};

struct BucketSync::Flight {
  std::vector<at::Tensor> grads;
  std::vector<Segment> segments;
  DType wire_dtype = DType::kFloat32;
  bool is_lossless = false;
  Algorithm algorithm = Algorithm::kAllReduce;
  std::unique_ptr<BucketSum> sum;  // where the process group does not add up: then the wire is its business

  at::Tensor wire;
  bool in_place = false;  // the wire is the gradient's own memory and nothing has to be undone: unpack only measures
  int64_t alignment = 1;  // of the gradients on the wire
  int64_t numel = 0;      // that they take there; behind them come flags, then riders if the wire is float32
  int64_t num_flags = 0;
  int64_t num_riders = 0;
  at::Tensor own_flags;  // this and the next: where they have a collective of their own
  at::Tensor own_riders;
  OnFlags on_flags;
  at::Tensor scale;
  at::Tensor stats;
  at::Tensor workspace;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::shared_ptr<const Failure> failure;
  bool ends_step = false;
  std::shared_ptr<Stopwatch> stopwatch;
  std::vector<at::Tensor> residuals;  // what the segments point to
  std::shared_ptr<BucketTotals> totals;
};

BucketSync::BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
                       std::shared_ptr<Whereabouts> whereabouts)
    : group_(std::move(group)),
      failure_(std::make_shared<const Failure>(c10::str("fastsync: averaging ", name, " failed on rank ",
                                                        group_->getRank(), " of ", group_->getSize(), ": "),
                                               std::move(whereabouts))),
      device_(device),
      can_exchange_(device.is_cpu() && group_->getBackend(device.type())->getBackendName() == "gloo"),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device))),
      workspace_(new_workspace(device)) {
  // Gloo's futures carry no CUDA events, so nothing that follows its collectives could be ordered after them.
  TORCH_CHECK_VALUE(device.is_cpu() || group_->getBackend(device.type())->getBackendName() != "gloo",
                    "fastsync: the gradients are on ", device, " and the process group is Gloo's, which fastsync ",
                    "supports on CPUs only; use NCCL");
}

// Sums of two float32 values are the same in whatever order and whoever takes them, so between two ranks full width
// need not go through all_reduce, whose steps take longer on Gloo. Where bandwidth is all that counts, its ring is
// as fast, and needs less memory.
Algorithm BucketSync::algorithm_for(const Compression& compression, DType grad, int64_t numel) const {
  const int64_t world_size = group_->getSize();
  if (compression.ranks_per_node > 1) {
    return Algorithm::kTwoLevel;
  }
  if (!compression.sums_in_float32) {
    const bool is_exact = compression.wire == Wire::kNone && (grad == DType::kFloat32 || grad == DType::kFloat64);
    const bool is_small = numel * size_of(grad) <= kOneShotBytesOfTwo;
    return is_exact && is_small && world_size == 2 && can_exchange_ ? Algorithm::kOneShot : Algorithm::kAllReduce;
  }
  if (compression.algorithm) {
    return *compression.algorithm;
  }
  const int64_t bytes = numel * size_of(wire_dtype(compression.wire, grad));
  return (world_size - 1) * (world_size - 2) * bytes <= kOneShotBytes * world_size ? Algorithm::kOneShot
                                                                                   : Algorithm::kTwoShot;
}

std::shared_ptr<BucketSync::Flight> BucketSync::send(std::vector<at::Tensor> grads, const Sync& sync,
                                                     std::shared_ptr<Stopwatch> stopwatch, const Extras& extras,
                                                     const std::vector<bool>& stand_in) {
  const WithoutPythonObjects without_python;
  auto flight = prepare(std::move(grads), sync, std::move(stopwatch), extras);
  add_residuals(*flight, sync, stand_in);
  if (flight->algorithm != Algorithm::kAllReduce) {
    send_to_ranks(*flight, sync, extras);
    return flight;
  }
  pack_for_all_reduce(*flight, extras, /*may_use_their_memory=*/false);
  // Alone there is nobody to sum with, but Gloo would wake a thread to find that out.
  if (group_->getSize() > 1 || !device_.is_cpu()) {
    all_reduce(*flight);
  }
  return flight;
}

std::shared_ptr<BucketSync::Flight> BucketSync::prepare(std::vector<at::Tensor> grads, const Sync& sync,
                                                        std::shared_ptr<Stopwatch> stopwatch, const Extras& extras) {
  const Wire wire = sync.compression.wire;
  auto flight = std::make_shared<Flight>();
  const DType grad_dtype = dtype_of(grads.front().scalar_type());
  flight->wire_dtype = wire_dtype(wire, grad_dtype);
  flight->alignment = alignment_of(flight->wire_dtype, grads.size());
  flight->segments = lay_out(grads, flight->wire_dtype, {}, flight->alignment);
  flight->numel = wire_length(flight->segments, flight->alignment);
  int64_t num_elements = 0;
  for (const at::Tensor& grad : grads) {
    num_elements += grad.numel();
  }
  flight->num_flags = extras.flags.defined() ? extras.flags.numel() : 0;
  flight->num_riders = extras.riders.defined() ? extras.riders.numel() : 0;
  flight->is_lossless = wire == Wire::kNone;
  flight->algorithm = algorithm_for(sync.compression, grad_dtype, num_elements);
  flight->grads = std::move(grads);
  failure_->whereabouts->average(sync.step);
  if (waits_to_send(sync.compression)) {
    agree_on_scale(flight->segments, grad_dtype);
  } else if (wire != Wire::kFloat16) {
    scale_.reset();  // it does not follow the gradients while another wire is in use
  }
  stopwatch->mark(Mark::kStart);
  flight->scale = scale_;
  flight->stats = stats_;
  flight->workspace = workspace_;
  flight->totals = totals_;
  flight->failure = failure_;
  flight->ends_step = sync.ends_step;
  flight->stopwatch = std::move(stopwatch);
  totals_->elements = num_elements;
  totals_->num_syncs += 1;
  return flight;
}

namespace {

bool is_own_wire(const std::vector<at::Tensor>& grads, DType wire) {
  return grads.size() == 1 && dtype_of(grads.front().scalar_type()) == wire;
}

}  // namespace

bool BucketSync::has_room(const std::vector<at::Tensor>& grads, const Compression& compression) const {
  const DType dtype = dtype_of(grads.front().scalar_type());
  int64_t numel = 0;
  for (const at::Tensor& grad : grads) {
    numel += grad.numel();
  }
  return algorithm_for(compression, dtype, numel) != Algorithm::kAllReduce ||
         !is_own_wire(grads, wire_dtype(compression.wire, dtype));
}

void BucketSync::pack_for_all_reduce(Flight& flight, const Extras& extras, bool may_use_their_memory) {
  const auto grad_dtype = flight.grads.front().scalar_type();
  const auto dtype = scalar_type_of(flight.wire_dtype);
  const int64_t world_size = group_->getSize();
  fp32_buffers_ = {};
  const int64_t num_extras = flight.num_flags + (dtype == at::kFloat ? flight.num_riders : 0);
  const bool shares_memory = may_use_their_memory && is_own_wire(flight.grads, flight.wire_dtype);
  if (shares_memory) {
    wire_.reset();
    flight.wire = flight.grads.front().view({-1});
  } else {
    flight.wire = wire_buffer(flight.numel + num_extras, dtype);
  }
  flight.in_place = shares_memory && !flight.scale.defined();

  PackArgs args{flight.segments.data(),
                static_cast<int64_t>(flight.segments.size()),
                dtype_of(grad_dtype),
                flight.wire_dtype,
                flight.wire.data_ptr(),
                1.0 / static_cast<double>(world_size),
                saturation_limit(flight.is_lossless ? DType::kFloat64 : flight.wire_dtype, world_size),
                data_or_null(flight.scale),
                stats_.data_ptr<double>()};
  args.alignment = flight.alignment;
  {
    RECORD_FUNCTION("fastsync::pack", {});
    run_pack(args, device_, workspace_);
    add_extras(flight, extras);
  }
  flight.stopwatch->mark(Mark::kSent);
}

namespace {

// Flags, then riders, in float32.
at::Tensor joined(const Extras& extras) {
  if (!extras.flags.defined() || !extras.riders.defined()) {
    return extras.flags.defined() ? extras.flags : extras.riders;
  }
  return at::cat({extras.flags, extras.riders});
}

}  // namespace

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
  const uint64_t seed = fingerprint(c10::str(sync.index, " ", group_->getRank()));
  return {/*is_stochastic=*/true, seed, counter_.const_data_ptr<int64_t>()};
}

void BucketSync::send_to_ranks(Flight& flight, const Sync& sync, const Extras& extras) {
  wire_.reset();
  const Rounding rounding = rounding_of(sync);
  PackedBucket bucket{flight.segments,   dtype_of(flight.grads.front().scalar_type()),
                      flight.wire_dtype, flight.algorithm,
                      flight.scale,      stats_,
                      workspace_,        joined(extras),
                      rounding,          rounding.is_stochastic ? counter_ : at::Tensor(),
                      flight.alignment};
  try {
    if (flight.algorithm == Algorithm::kTwoLevel) {
      flight.sum = std::make_unique<TwoLevelSum>(group_, device_, sync.tag, std::move(bucket),
                                                 sync.compression.ranks_per_node, fp32_buffers_);
    } else {
      flight.sum = std::make_unique<Fp32Sum>(group_, device_, sync.tag, std::move(bucket), fp32_buffers_);
    }
    if (sync.compression.error_feedback && needs_driving(flight)) {
      own_residuals(*flight.sum);
    }
    flight.sum->send();
  } catch (const std::exception& error) {
    failure_->raise(error.what());
  }
  flight.stopwatch->mark(Mark::kSent);
}

namespace {

// values → wire[offset...]. On a CPU without copy_, which takes longer than packing the gradients of a small policy.
void append(const at::Tensor& wire, int64_t offset, const at::Tensor& values) {
  if (!wire.device().is_cpu()) {
    wire.narrow(0, offset, values.numel()).copy_(values);
    return;
  }
  dispatch_grad(dtype_of(wire.scalar_type()), [&](auto zero) {
    using T = decltype(zero);
    const auto* from = values.const_data_ptr<float>();
    std::transform(from, from + values.numel(), static_cast<T*>(wire.data_ptr()) + offset,
                   [](float value) { return encode<T>(value); });
  });
}

}  // namespace

void BucketSync::add_extras(Flight& flight, const Extras& extras) {
  const bool has_room = flight.wire.numel() > flight.numel;
  if (flight.num_flags > 0 && has_room) {
    append(flight.wire, flight.numel, extras.flags);
  } else if (flight.num_flags > 0) {
    flight.own_flags = extras.flags.clone();
  }
  if (flight.num_riders > 0 && flight.wire.scalar_type() == at::kFloat) {
    append(flight.wire, flight.numel + flight.num_flags, extras.riders);
  } else if (flight.num_riders > 0) {
    flight.own_riders = extras.riders.clone();
  }
}

at::Tensor BucketSync::flags(const Flight& flight) {
  if (flight.own_flags.defined()) {
    return flight.own_flags;
  }
  return flight.sum ? flight.sum->extras().narrow(0, 0, flight.num_flags)
                    : flight.wire.narrow(0, flight.numel, flight.num_flags);
}

at::Tensor BucketSync::riders(const Flight& flight) {
  if (flight.sum) {
    return flight.sum->extras().narrow(0, flight.num_flags, flight.num_riders);
  }
  return flight.own_riders.defined()
             ? flight.own_riders
             : flight.wire.narrow(0, flight.wire.numel() - flight.num_riders, flight.num_riders);
}

void BucketSync::all_reduce(Flight& flight) {
  std::vector<at::Tensor> buffers{flight.wire};
  for (const at::Tensor& extras : {flight.own_flags, flight.own_riders}) {
    if (extras.defined()) {
      buffers.push_back(extras);
    }
  }
  // Several go as one launch where the backend can do that; Gloo has them in flight side by side.
  const bool grouped = buffers.size() > 1 && group_->getBackend(device_.type())->supportsCoalescing();
  try {
    std::optional<Coalescing> together;
    if (grouped) {
      together.emplace(*group_, device_);
    }
    for (const at::Tensor& buffer : buffers) {
      totals_->wire_bytes += static_cast<int64_t>(buffer.nbytes());
      std::vector<at::Tensor> tensors{buffer};
      flight.works.push_back(group_->allreduce(tensors));
    }
    if (grouped) {
      flight.works = {together->end()};
    }
  } catch (const std::exception& error) {
    failure_->raise(error.what());
  }
}

void BucketSync::wait(Flight& flight) {
  RECORD_FUNCTION("fastsync::wait", {});
  for (const auto& work : std::exchange(flight.works, {})) {
    try {
      work->wait();
    } catch (const std::exception& error) {
      flight.failure->raise(error.what());
    }
  }
  if (!flight.wire.device().is_cpu()) {
    // They were made on backward's stream, which need not be this one.
    const auto stream = c10::impl::VirtualGuardImpl(flight.wire.device().type()).getStream(flight.wire.device());
    for (const at::Tensor& buffer : {flight.wire, flight.own_flags, flight.own_riders}) {
      if (buffer.defined()) {
        buffer.record_stream(stream);
      }
    }
  }
}

void BucketSync::drive(Flight& flight) {
  if (flight.sum) {
    flight.sum->drive();
  }
}

bool BucketSync::needs_driving(const Flight& flight) {
  return flight.algorithm == Algorithm::kTwoShot || flight.algorithm == Algorithm::kTwoLevel;
}

void BucketSync::receive(Flight& flight) {
  if (!flight.sum) {
    wait(flight);
    unpack(flight);
  } else {
    try {
      flight.sum->finish(*flight.stopwatch);
      flight.totals->wire_bytes += flight.sum->sent_bytes();
    } catch (const std::exception& error) {
      flight.failure->raise(error.what());
    }
    flight.stopwatch->mark(Mark::kDone);
  }
  if (flight.ends_step) {
    flight.failure->whereabouts->rest();
  }
  if (flight.on_flags && flight.num_flags > 0) {
    flight.on_flags(flags(flight));
  }
}

void BucketSync::discard(Flight& flight) {
  if (flight.sum) {
    const at::Tensor nowhere = at::empty({flight.sum->num_values()}, flight.grads.front().options());
    flight.sum->redirect(nowhere);
    receive(flight);
    return;
  }
  wait(flight);
  const at::Tensor nowhere = at::empty({flight.numel}, flight.grads.front().options());
  flight.grads = {nowhere};
  flight.segments = lay_out(flight.grads);
  unpack(flight);
}

c10::intrusive_ptr<Future> BucketSync::sync(const at::Tensor& buffer, std::vector<at::Tensor> grads, const Sync& sync,
                                            std::shared_ptr<Stopwatch> stopwatch, ProgressThread& progress,
                                            const Extras& extras, OnFlags on_flags) {
  const WithoutPythonObjects without_python;
  auto flight = prepare(std::move(grads), sync, std::move(stopwatch), extras);
  flight->on_flags = std::move(on_flags);
  add_residuals(*flight, sync, {});
  if (flight->algorithm != Algorithm::kAllReduce) {
    send_to_ranks(*flight, sync, extras);
    return receive_later(std::move(flight), buffer, progress);
  }
  pack_for_all_reduce(*flight, extras, /*may_use_their_memory=*/true);
  all_reduce(*flight);
  if (device_.is_cpu() && flight->works.size() > 1) {
    return receive_later(std::move(flight), buffer, progress);
  }
  const auto work = flight->works.front();
  if (device_.is_cpu()) {
    flight->works.clear();  // see Flight: they hold the process group
  }
  // With the thread's state, for without it a profiler would not see what happens on the group's thread.
  return work->getFuture()->then(at::wrapPropagateTLSState([flight = std::move(flight), buffer](Future& reduced) {
                                   if (reduced.hasError()) {
                                     flight->failure->raise(reduced.tryRetrieveErrorMessage());
                                   }
                                   // The backend keeps the wire until somebody has waited for the work itself.
                                   receive(*flight);
                                   return c10::IValue(buffer);
                                 }),
                                 c10::TensorType::get());
}

// On CUDA nothing waits but a stream, so there it happens at once, beside backward's.
c10::intrusive_ptr<Future> BucketSync::receive_later(std::shared_ptr<Flight> flight, const at::Tensor& buffer,
                                                     ProgressThread& progress) const {
  std::vector<c10::Device> devices;
  if (!device_.is_cpu()) {
    devices.push_back(device_);
  }
  auto future = c10::make_intrusive<Future>(c10::TensorType::get(), devices);
  if (!device_.is_cpu()) {
    call_beside(device_, [&] {
      receive(*flight);
      future->markCompleted(c10::IValue(buffer));
    });
    return future;
  }
  progress.post_urgent(at::wrapPropagateTLSState([flight] { drive(*flight); }));
  progress.post(at::wrapPropagateTLSState([flight = std::move(flight), buffer, future] {
    try {
      receive(*flight);
    } catch (...) {
      future->setError(std::current_exception());
      return;
    }
    future->markCompleted(c10::IValue(buffer));
  }));
  return future;
}

void BucketSync::unpack(const Flight& flight) {
  RECORD_FUNCTION("fastsync::unpack", {});
  flight.stopwatch->mark(Mark::kReduced);
  const auto num_segments = static_cast<int64_t>(flight.segments.size());
  const auto grad_dtype = dtype_of(flight.grads.front().scalar_type());
  if (flight.in_place) {
    run_measure({flight.segments.data(), num_segments, grad_dtype, flight.stats.data_ptr<double>()},
                flight.wire.device(), flight.workspace);
  } else {
    run_unpack({flight.segments.data(), num_segments, grad_dtype, flight.wire_dtype, flight.wire.data_ptr(),
                data_or_null(flight.scale), flight.stats.data_ptr<double>()},
               flight.wire.device(), flight.workspace);
  }
  flight.stopwatch->mark(Mark::kDone);
}

// After zeros, or nothing finite, the scale may be anything. Where it takes a wait for the device to know that, it
// rises step by step instead, see next_bucket_scale.
bool BucketSync::has_lost_scale() const {
  return device_.is_cpu() && totals_->num_syncs > 0 && stats_.const_data_ptr<double>()[kMaxMagnitude] == 0.0;
}

// The first scale comes from the gradients themselves: the largest magnitude over all ranks. One pass and one number to
// reduce, once in a bucket's life unless it gets lost; the scales after follow the reduced gradients. All on the
// device, for no host waits.
void BucketSync::agree_on_scale(const std::vector<Segment>& segments, DType dtype) {
  measure(segments, dtype);
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  std::vector<at::Tensor> tensors{largest};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  try {
    group_->allreduce(tensors, options)->wait();
  } catch (const std::exception& error) {
    failure_->raise(error.what());
  }
  const at::Tensor exponent = kTargetExponent - std::get<1>(at::frexp(largest));
  const at::Tensor bits = exponent.clamp(-kMaxScaleExponent, kMaxScaleExponent).to(at::kInt).add(127).mul(1 << 23);
  const at::Tensor otherwise =
      scale_.defined() ? scale_ : at::ones({1}, at::TensorOptions().dtype(at::kFloat).device(device_));
  scale_ = at::where(largest > 0, bits.view(at::kFloat), otherwise);
}

// ---- error feedback -------------------------------------------------------------------------------------------------

namespace {

at::Tensor no_residual(const at::Tensor& grad) {
  const auto dtype = grad.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::zeros({grad.numel()}, grad.options().dtype(dtype));
}

}  // namespace

// Where error feedback has been turned off, what there is is sent once more, and what that loses is lost.
void BucketSync::add_residuals(Flight& flight, const Sync& sync, const std::vector<bool>& stand_in) {
  const bool error_feedback = sync.compression.error_feedback;
  if (residuals_.empty() && !error_feedback) {
    return;
  }
  if (residuals_.empty()) {
    std::transform(flight.grads.begin(), flight.grads.end(), std::back_inserter(residuals_), no_residual);
  }
  if (!needs_driving(flight) || !error_feedback) {
    disown(/*now_owned=*/{}, /*num_owned=*/0);
  }
  for (size_t i = 0; i < flight.segments.size(); ++i) {
    // What comes back for a gradient that no rank has goes nowhere.
    const bool takes_part = i >= stand_in.size() || !stand_in[i];
    flight.segments[i].residual = takes_part ? residuals_[i].data_ptr() : nullptr;
  }
  flight.residuals = residuals_;
  if (!error_feedback) {
    residuals_.clear();
  }
}

void BucketSync::own_residuals(BucketSum& sum) {
  const auto owned = sum.owned();
  if (owned != owned_ || !loaded_residuals_of_sums_.empty()) {
    disown(owned, sum.num_owned());
  }
  sum.keep_residual(owned_residual_);
  sum.keep_own_residuals(residuals_);
}

// Hands over the residuals of the sums to what is owned now. What is not goes back to what this rank will pack: n
// times, for it is part of a mean over n ranks.
void BucketSync::disown(const std::vector<BucketSum::Owned>& now_owned, int64_t num_owned) {
  auto of_sums = loaded_residuals_of_sums_.empty() ? residuals_of_sums() : std::exchange(loaded_residuals_of_sums_, {});
  owned_ = now_owned;
  owned_residual_ = owned_.empty() ? at::Tensor() : at::zeros({num_owned}, residuals_.front().options());
  if (of_sums.empty()) {
    return;
  }
  for (const auto& owned : owned_) {
    const at::Tensor part = of_sums[owned.segment].narrow(0, owned.first, owned.count);
    owned_residual_.narrow(0, owned.place, owned.count).copy_(part);
    part.zero_();
  }
  for (size_t i = 0; i < residuals_.size(); ++i) {
    residuals_[i].add_(of_sums[i], static_cast<double>(group_->getSize()));
  }
}

// One for each gradient, with zeros where other ranks own the sums; none where nothing is owned.
std::vector<at::Tensor> BucketSync::residuals_of_sums() const {
  std::vector<at::Tensor> of_sums;
  if (!owned_.empty()) {
    std::transform(residuals_.begin(), residuals_.end(), std::back_inserter(of_sums),
                   [](const at::Tensor& residual) { return at::zeros_like(residual); });
  }
  for (const auto& owned : owned_) {
    of_sums[owned.segment]
        .narrow(0, owned.first, owned.count)
        .copy_(owned_residual_.narrow(0, owned.place, owned.count));
  }
  return of_sums;
}

std::vector<Residual> BucketSync::residuals() const {
  const auto of_sums = loaded_residuals_of_sums_.empty() ? residuals_of_sums() : loaded_residuals_of_sums_;
  std::vector<Residual> residuals;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    residuals.push_back({residuals_[i].clone(), of_sums.empty() ? at::Tensor() : of_sums[i].clone()});
  }
  return residuals;
}

// Added to every rank's own it is the same part of the next mean.
bool BucketSync::take_back(size_t index, const at::Tensor& mean) {
  if (!has_residuals()) {
    return false;
  }
  const at::Tensor flat = mean.as_strided({mean.numel()}, {1});
  residuals_[index].add_(at::where(flat.isfinite(), flat, 0.0));
  return true;
}

void BucketSync::measure(const std::vector<at::Tensor>& grads) {
  const DType dtype = grads.empty() ? DType::kFloat32 : dtype_of(grads.front().scalar_type());
  measure(lay_out(grads), dtype);
}

void BucketSync::measure(const std::vector<Segment>& segments, DType dtype) {
  run_measure({segments.data(), static_cast<int64_t>(segments.size()), dtype, stats_.data_ptr<double>()}, device_,
              workspace_);
}

void BucketSync::set_residuals(const std::vector<Residual>& residuals) {
  residuals_.clear();
  loaded_residuals_of_sums_.clear();
  owned_.clear();
  owned_residual_.reset();
  for (const Residual& residual : residuals) {
    residuals_.push_back(residual.own.clone());
    loaded_residuals_of_sums_.push_back(residual.of_sums.defined() ? residual.of_sums.clone()
                                                                   : at::zeros_like(residual.own));
  }
}

at::Tensor BucketSync::wire_buffer(int64_t numel, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  if (!device_.is_cpu()) {
    return at::empty({numel}, options);  // the caching allocator's, so that idle buckets hold no memory
  }
  if (!wire_.defined() || wire_.scalar_type() != dtype || wire_.numel() != numel) {
    wire_ = at::empty({numel}, options);
  }
  return wire_;
}

}  // namespace fastsync
