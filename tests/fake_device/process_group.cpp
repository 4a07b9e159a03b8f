#include "process_group.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "device.h"

namespace fake_device {
namespace {

using c10::ivalue::Future;

class StreamWork : public c10d::Work {
 public:
  StreamWork(const c10::Stream& stream, std::vector<at::Tensor> outputs, Stash stash)
      : device_(stream.device()), stash_(std::move(stash)) {
    record(end_, stream);
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()), std::vector{device_});
    const c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(std::move(outputs)));
  }

  bool isCompleted() override { return query(end_); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    block(end_, current_stream(device_));
    stash_->clear();
    return true;
  }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  c10::Device device_;
  Event end_;
  Stash stash_;
  c10::intrusive_ptr<Future> future_;
};

// What the end of a group returns whose calls have run before: it waits for nothing.
class EmptyWork : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

// What a collective inside a group returns. Its event is one of an earlier collective, because nobody has recorded it.
class StaleWork : public EmptyWork {
 public:
  explicit StaleWork(std::string name) : name_(std::move(name)) {}

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    report("waited for the work of " + name_ + " inside a group, whose event is of an earlier call");
    return true;
  }

 private:
  std::string name_;
};

std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(all),
                 [](const at::Tensor& tensor) { return fake_device::on_host(tensor); });
  return all;
}

}  // namespace

Group::Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
    : Backend(rank, size), gloo_(std::move(gloo)) {}

// ---- calls ----------------------------------------------------------------------------------------------------------

c10::Stream Group::stream_of(c10::Device device, std::optional<int> peer) {
  const std::pair key(static_cast<int>(device.index()), peer.value_or(-1));
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    found = streams_.emplace(key, new_stream(device.index())).first;
  }
  return found->second;
}

void Group::check(const std::string& name, const Tensors& tensors, c10::Device device) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.device() == device, name, ": tensors on ", device, " and ", tensor.device());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), name, ": a tensor with gaps");
  }
  if (calls_until_failure_ >= 0 && calls_until_failure_-- == 0) {
    has_failed_ = true;
    C10_THROW_ERROR(DistBackendError, name + " failed, as the group was told to");  // as NCCL's
  }
}

Group::Work Group::give(const std::string& name, Tensors read, Tensors written, bool is_async,
                        std::function<Work()> on_gloo, std::optional<int> peer) {
  const c10::Device device = (read.empty() ? written : read).front().device();
  const c10::Stream now = current_stream(device);
  const bool is_queued = is_open_ && !runs_at_once_;
  const c10::Stream stream = is_async ? stream_of(device, is_queued ? std::nullopt : peer) : now;
  Tensors all = read;
  all.insert(all.end(), written.begin(), written.end());
  check(name, all, device);
  Event given;
  record(given, now);
  block(given, stream);
  Given call{name, stream, std::move(read), std::move(written), std::move(on_gloo)};
  if (is_queued) {
    queued_.push_back(std::move(call));
    if (peer) {
      return {};
    }
    return c10::make_intrusive<StaleWork>(name);
  }
  if (is_open_) {  // the host may not wait: the others may be sent their messages only after this rank's have come
    under_way_.push_back(call.on_gloo());
    return on_stream({std::move(call)});
  }
  return run({std::move(call)});
}

Group::Work Group::run(std::vector<Given> all) {
  std::vector<Work> works;
  for (const Given& call : all) {
    works.push_back(call.on_gloo());
  }
  for (const Work& work : works) {
    work->wait();
  }
  return on_stream(all);
}

Group::Work Group::on_stream(const std::vector<Given>& all) {
  auto stash = std::make_shared<Tensors>();
  Tensors outputs;
  for (const Given& call : all) {
    std::vector<Touch> touches;
    for (const at::Tensor& tensor : call.read) {
      add_touches(touches, tensor, /*is_written=*/false);
      stash->push_back(tensor);
    }
    for (const at::Tensor& tensor : call.written) {
      add_touches(touches, tensor, /*is_written=*/true);
      stash->push_back(tensor);
      outputs.push_back(tensor);
    }
    fake_device::run(call.stream, call.name, touches);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(stashes_, [](const Stash& each) { return each->empty(); });
  stashes_.push_back(stash);
  return c10::make_intrusive<StreamWork>(all.back().stream, std::move(outputs), std::move(stash));
}

void Group::startCoalescing() {
  is_open_ = true;
  has_failed_ = false;
}

Group::Work Group::endCoalescing() {
  is_open_ = false;
  auto queued = std::exchange(queued_, {});
  const auto under_way = std::exchange(under_way_, {});
  if (has_failed_) {  // what is left of the group may wait for messages that nobody sends: NCCL's stream would, not the
                      // host
    return {};
  }
  if (runs_at_once_) {
    for (const Work& work : under_way) {
      work->wait();
    }
    return c10::make_intrusive<EmptyWork>();
  }
  return queued.empty() ? Work() : run(std::move(queued));
}

// ---- what can be called ---------------------------------------------------------------------------------------------

Group::Work Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return give("broadcast", {}, tensors, options.asyncOp, [this, tensors, options] {
    auto host = on_host(tensors);
    return gloo_->broadcast(host, options);
  });
}

at::Tensor Group::allocateTensor(long size, at::TensorOptions options) {
  num_lent_ += 1;
  return at::empty({size}, options);
}

// For AVG each rank's value is multiplied by 1/n before the sum, as NCCL does.
Group::Work Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return give("allreduce", {}, tensors, options.asyncOp, [this, tensors, options] {
    auto host = on_host(tensors);
    auto on_gloo = options;
    if (options.reduceOp == c10d::ReduceOp::AVG) {
      on_gloo.reduceOp = c10d::ReduceOp::SUM;
      for (at::Tensor& each : host) {
        each.mul_(1.0 / size_);
      }
    }
    return gloo_->allreduce(host, on_gloo);
  });
}

Group::Work Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return give("allgather", inputs, outputs.front(), options.asyncOp, [this, outputs, inputs, options] {
    std::vector<Tensors> to{on_host(outputs.front())};
    auto from = on_host(inputs);
    return gloo_->allgather(to, from, options);
  });
}

Group::Work Group::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return give("_allgather_base", {input}, {output}, options.asyncOp, [this, output, input, options] {
    auto to = fake_device::on_host(output);
    auto from = fake_device::on_host(input);
    return gloo_->_allgather_base(to, from, options);
  });
}

Group::Work Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(outputs[rank_].is_alias_of(inputs[rank_]) && outputs[rank_].data_ptr() == inputs[rank_].data_ptr(),
              "alltoall: the group does not copy a rank's own tensor");
  Tensors read(inputs), written(outputs);
  read.erase(read.begin() + rank_);
  written.erase(written.begin() + rank_);
  const auto on_gloo = [this, read, written]() -> Work {
    constexpr int kTag = 1 << 29;
    std::vector<Work> works;
    for (int i = 0; i < size_ - 1; ++i) {
      Tensors to{fake_device::on_host(written[i])};
      works.push_back(gloo_->recv(to, i < rank_ ? i : i + 1, kTag));
    }
    for (int i = 0; i < size_ - 1; ++i) {
      Tensors from{fake_device::on_host(read[i])};
      works.push_back(gloo_->send(from, i < rank_ ? i : i + 1, kTag));
    }
    const Work last = works.back();  // which is waited for once, by who asked
    works.pop_back();
    for (const Work& work : works) {
      work->wait();
    }
    return last;
  };
  return give("alltoall", read, written, options.asyncOp, on_gloo);
}

Group::Work Group::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                 std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return give("alltoall_base", {input}, {output}, options.asyncOp,
              [this, output, input, output_sizes, input_sizes, options]() mutable {
                auto to = fake_device::on_host(output);
                auto from = fake_device::on_host(input);
                return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
              });
}

Group::Work Group::send(Tensors& tensors, int to, int tag) {
  const auto on_gloo = [this, tensors, to, tag] {
    auto host = on_host(tensors);
    return gloo_->send(host, to, tag);
  };
  return give("send", tensors, {}, /*is_async=*/true, on_gloo, to);
}

Group::Work Group::recv(Tensors& tensors, int from, int tag) {
  const auto on_gloo = [this, tensors, from, tag] {
    auto host = on_host(tensors);
    return gloo_->recv(host, from, tag);
  };
  return give("recv", {}, tensors, /*is_async=*/true, on_gloo, from);
}

// ---- what a test may ask --------------------------------------------------------------------------------------------

int64_t Group::kept_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const Stash& stash : stashes_) {
    for (const at::Tensor& tensor : *stash) {
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

}  // namespace fake_device
