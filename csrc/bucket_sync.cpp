#include "bucket_sync.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "without_python_objects.h"

namespace fastsync {

using c10::ivalue::Future;

Wire wire_from_name(const std::string& name) {
  for (const Wire wire : {Wire::kNone, Wire::kFloat16, Wire::kBFloat16}) {
    if (name == name_of(wire)) {
      return wire;
    }
  }
  TORCH_CHECK_VALUE(false, "wire: expected 'none', 'fp16' or 'bf16', got '", name, "'");
}

const char* name_of(Wire wire) {
  switch (wire) {
    case Wire::kNone:
      return "none";
    case Wire::kFloat16:
      return "fp16";
    case Wire::kBFloat16:
      return "bf16";
  }
  TORCH_INTERNAL_ASSERT(false);
}

namespace {

at::ScalarType wire_dtype(Wire wire, at::ScalarType grad) {
  switch (wire) {
    case Wire::kFloat16:
      return at::kHalf;
    case Wire::kBFloat16:
      return at::kBFloat16;
    case Wire::kNone:
      return grad;
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

struct BucketSync::Flight {
  std::vector<at::Tensor> grads;
  std::vector<Segment> segments;
  at::Tensor wire;
  bool in_place = false;  // the wire is the gradient's own memory and nothing has to be undone: unpack only measures
  int64_t numel = 0;      // of the gradients; behind them on the wire come flags, then riders if it is float32
  int64_t num_flags = 0;
  int64_t num_riders = 0;
  at::Tensor own_riders;  // where they have a collective of their own
  at::Tensor scale;
  at::Tensor stats;
  at::Tensor workspace;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::shared_ptr<const std::string> failure;
  std::shared_ptr<Stopwatch> stopwatch;
};

BucketSync::BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device)
    : group_(std::move(group)),
      failure_(std::make_shared<const std::string>(c10::str("fastsync: all_reduce of ", name, " failed on rank ",
                                                            group_->getRank(), " of ", group_->getSize(), ": "))),
      device_(device),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device))),
      workspace_(new_workspace(device)) {
  // Gloo's futures carry no CUDA events, so nothing that follows its collectives could be ordered after them.
  TORCH_CHECK_VALUE(device.is_cpu() || group_->getBackend(device.type())->getBackendName() != "gloo",
                    "fastsync: the gradients are on ", device, " and the process group is Gloo's, which fastsync ",
                    "supports on CPUs only; use NCCL");
}

std::shared_ptr<BucketSync::Flight> BucketSync::send(std::vector<at::Tensor> grads, Wire wire,
                                                     std::shared_ptr<Stopwatch> stopwatch, const Extras& extras) {
  auto flight = prepare(std::move(grads), wire, std::move(stopwatch), extras, /*may_use_their_memory=*/false);
  // Alone there is nobody to sum with, but Gloo would wake a thread to find that out.
  if (group_->getSize() > 1 || !device_.is_cpu()) {
    all_reduce(*flight);
  }
  return flight;
}

std::shared_ptr<BucketSync::Flight> BucketSync::prepare(std::vector<at::Tensor> grads, Wire wire,
                                                        std::shared_ptr<Stopwatch> stopwatch, const Extras& extras,
                                                        bool may_use_their_memory) {
  const WithoutPythonObjects without_python;
  const auto grad_dtype = grads.front().scalar_type();
  const auto dtype = wire_dtype(wire, grad_dtype);
  const int64_t world_size = group_->getSize();

  auto flight = std::make_shared<Flight>();
  flight->segments = lay_out(grads);
  flight->grads = std::move(grads);
  if (wire == Wire::kFloat16 && !scale_.defined()) {
    agree_on_scale(flight->segments, dtype_of(grad_dtype));
  }
  stopwatch->mark(Mark::kStart);
  if (wire == Wire::kFloat16) {
    flight->scale = scale_;
  }
  flight->numel = flight->segments.back().offset + flight->segments.back().numel;
  flight->num_flags = extras.flags.defined() ? extras.flags.numel() : 0;
  flight->num_riders = extras.riders.defined() ? extras.riders.numel() : 0;
  const int64_t num_extras = flight->num_flags + (dtype == at::kFloat ? flight->num_riders : 0);
  const bool shares_memory = may_use_their_memory && flight->grads.size() == 1 && dtype == grad_dtype;
  if (shares_memory) {
    wire_.reset();
    flight->wire = flight->grads.front().view({-1});
  } else {
    flight->wire = wire_buffer(flight->numel + num_extras, dtype);
  }
  flight->in_place = shares_memory && !flight->scale.defined();

  const PackArgs args{flight->segments.data(),
                      static_cast<int64_t>(flight->segments.size()),
                      dtype_of(grad_dtype),
                      dtype_of(dtype),
                      flight->wire.data_ptr(),
                      1.0 / static_cast<double>(world_size),
                      saturation_limit(wire == Wire::kNone ? DType::kFloat64 : dtype_of(dtype), world_size),
                      data_or_null(flight->scale),
                      stats_.data_ptr<double>()};
  {
    RECORD_FUNCTION("fastsync::pack", {});
    run_pack(args, device_, workspace_);
    add_extras(*flight, extras);
  }
  stopwatch->mark(Mark::kSent);
  flight->stats = stats_;
  flight->workspace = workspace_;
  flight->failure = failure_;
  flight->stopwatch = std::move(stopwatch);
  totals_->elements = flight->numel;
  totals_->num_syncs += 1;
  return flight;
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
  if (flight.num_flags > 0) {
    append(flight.wire, flight.numel, extras.flags);
  }
  if (flight.num_riders > 0 && flight.wire.scalar_type() == at::kFloat) {
    append(flight.wire, flight.numel + flight.num_flags, extras.riders);
  } else if (flight.num_riders > 0) {
    flight.own_riders = extras.riders.clone();
  }
}

at::Tensor BucketSync::flags(const Flight& flight) { return flight.wire.narrow(0, flight.numel, flight.num_flags); }

at::Tensor BucketSync::riders(const Flight& flight) {
  return flight.own_riders.defined()
             ? flight.own_riders
             : flight.wire.narrow(0, flight.wire.numel() - flight.num_riders, flight.num_riders);
}

void BucketSync::all_reduce(Flight& flight) {
  std::vector<at::Tensor> buffers{flight.wire};
  if (flight.own_riders.defined()) {
    buffers.push_back(flight.own_riders);
  }
  // Several go as one launch where the backend can do that; Gloo has them in flight side by side.
  const bool grouped = buffers.size() > 1 && group_->getBackend(device_.type())->supportsCoalescing();
  try {
    if (grouped) {
      group_->startCoalescing(device_.type());
    }
    for (const at::Tensor& buffer : buffers) {
      totals_->wire_bytes += static_cast<int64_t>(buffer.nbytes());
      std::vector<at::Tensor> tensors{buffer};
      flight.works.push_back(group_->allreduce(tensors));
    }
    if (grouped) {
      flight.works = {group_->endCoalescing(device_.type())};
    }
  } catch (const std::exception& error) {
    TORCH_CHECK(false, *failure_, error.what());
  }
}

void BucketSync::wait(Flight& flight) {
  RECORD_FUNCTION("fastsync::wait", {});
  for (const auto& work : std::exchange(flight.works, {})) {
    try {
      work->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, *flight.failure, error.what());
    }
  }
  if (!flight.wire.device().is_cpu()) {
    // They were made on backward's stream, which need not be this one.
    const auto stream = c10::impl::VirtualGuardImpl(flight.wire.device().type()).getStream(flight.wire.device());
    flight.wire.record_stream(stream);
    if (flight.own_riders.defined()) {
      flight.own_riders.record_stream(stream);
    }
  }
}

void BucketSync::receive(Flight& flight) {
  wait(flight);
  unpack(flight);
}

void BucketSync::discard(Flight& flight) {
  wait(flight);
  const at::Tensor nowhere = at::empty({flight.numel}, flight.grads.front().options());
  flight.grads = {nowhere};
  flight.segments = lay_out(flight.grads);
  unpack(flight);
}

c10::intrusive_ptr<Future> BucketSync::sync(std::vector<at::Tensor> grads, Wire wire,
                                            std::shared_ptr<Stopwatch> stopwatch) {
  const WithoutPythonObjects without_python;
  auto flight = prepare(std::move(grads), wire, std::move(stopwatch), {}, /*may_use_their_memory=*/true);
  all_reduce(*flight);
  const auto work = std::exchange(flight->works, {}).front();
  // With the thread's state, for without it a profiler would not see what happens on the group's thread.
  return work->getFuture()->then(at::wrapPropagateTLSState([flight = std::move(flight)](Future& reduced) {
                                   TORCH_CHECK(!reduced.hasError(), *flight->failure,
                                               reduced.tryRetrieveErrorMessage());
                                   unpack(*flight);
                                   return c10::IValue(flight->grads.front());
                                 }),
                                 c10::TensorType::get());
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
    run_unpack({flight.segments.data(), num_segments, grad_dtype, dtype_of(flight.wire.scalar_type()),
                flight.wire.data_ptr(), data_or_null(flight.scale), flight.stats.data_ptr<double>()},
               flight.wire.device(), flight.workspace);
  }
  flight.stopwatch->mark(Mark::kDone);
}

// The first scale comes from the gradients themselves: the largest magnitude over all ranks. One pass and one number to
// reduce, once in a bucket's life; the scales after follow the reduced gradients. All on the device, for no host waits.
void BucketSync::agree_on_scale(const std::vector<Segment>& segments, DType dtype) {
  run_measure({segments.data(), static_cast<int64_t>(segments.size()), dtype, stats_.data_ptr<double>()}, device_,
              workspace_);
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  std::vector<at::Tensor> tensors{largest};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  try {
    group_->allreduce(tensors, options)->wait();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, *failure_, error.what());
  }
  const at::Tensor exponent = kTargetExponent - std::get<1>(at::frexp(largest));
  const at::Tensor bits = exponent.clamp(-kMaxScaleExponent, kMaxScaleExponent).to(at::kInt).add(127).mul(1 << 23);
  scale_ = at::where(largest > 0, bits.view(at::kFloat), 1.0F).to(at::kFloat);
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
