#include "transport/team.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "passes/cuda_graphs.h"
#include "transport/backend_name.h"
#include "transport/progress_thread.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

bool is_nccl(const std::string& name) { return name == "nccl" || name == "nccl2"; }

// Note [Works of a launch]
//   torch has two classes for NCCL, and they differ in what tells that the calls between startCoalescing and
//   endCoalescing are done. In the older one, "nccl", all calls are one launch, and only the work of the end tells. The
//   calls' own works hold events that torch has used before, because it takes them from a cache. A wait for those is
//   for an earlier collective, and breaks the capture of a CUDA graph. In the newer one, "nccl2", each collective runs
//   at once, and only its own work tells. Other backends are waited for in both ways.
//
// Makes one launch of what the call gives the process group, if the backend can do that. Adds the works to wait for.
// The launch ends even if the call throws, because otherwise nothing that this thread calls later would be launched.
template <class Call>
void coalesced(c10d::ProcessGroup& group, c10::Device device, Transfer::Works& works, const Call& call) {
  const WithoutPythonObjects without_python;
  const auto num_before = static_cast<Transfer::Works::difference_type>(works.size());
  const c10::DeviceGuard guard(device);  // the backend asks for the current device where nothing else tells it
  group.startCoalescing(device.type());
  try {
    call();
  } catch (...) {
    try {
      group.endCoalescing(device.type());
    } catch (const std::exception& error) {
      TORCH_WARN("fastsync: ending a group of calls after an error: ", error.what());
    }
    throw;
  }
  if (Work end = group.endCoalescing(device.type())) {
    if (backend_name(group, device) == "nccl") {
      works.erase(works.begin() + num_before, works.end());
    }
    works.push_back(std::move(end));
  }
}

using Message = std::pair<at::Tensor, int>;  // the bytes, and the other rank's number in the group

// Transfers rows by a message to each other rank and one from each. Others may use the group meanwhile. On a CPU a
// message travels as soon as both sides have posted it. On CUDA all messages are one launch, in send.
class Messages final : public Transfer {
 public:
  Messages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::vector<Message> sent,
           std::vector<Message> expected, int tag)
      : group_(std::move(group)), device_(device), sent_(std::move(sent)), expected_(std::move(expected)), tag_(tag) {
    for (const Message& message : sent_) {
      sent_bytes_ += static_cast<int64_t>(message.first.nbytes());
    }
    if (device_.is_cpu()) {
      post(expected_, &c10d::ProcessGroup::recv, arrivals_);
    }
  }

  // The rows' memory has to live until the messages have come: if it goes, Gloo reads nothing more from that
  // connection.
  ~Messages() override {
    if (device_.is_cpu() && !(arrivals_.empty() && departures_.empty())) {
      wait_in_background(
          [group = group_, arrivals = std::move(arrivals_), departures = std::move(departures_)]() mutable {
            for (Works* works : {&arrivals, &departures}) {
              while (!works->empty()) {
                try {
                  wait_for(*works);
                } catch (const std::exception&) {
                }
              }
            }
          });
    }
  }

  void send() override {
    if (device_.is_cpu() || sent_.empty()) {
      post(sent_, &c10d::ProcessGroup::send, departures_);
      return;
    }
    coalesced(*group_, device_, arrivals_, [&] {
      post(expected_, &c10d::ProcessGroup::recv, arrivals_);
      post(sent_, &c10d::ProcessGroup::send, departures_);
    });
  }

 private:
  void post(const std::vector<Message>& messages, Work (c10d::ProcessGroup::*call)(std::vector<at::Tensor>&, int, int),
            Works& works) {
    const WithoutPythonObjects without_python;
    for (size_t i = works.size(); i < messages.size(); ++i) {  // an earlier call has posted the others
      std::vector<at::Tensor> tensors{messages[i].first};
      works.push_back(((*group_).*call)(tensors, messages[i].second, tag_));
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::vector<Message> sent_;
  std::vector<Message> expected_;
  int tag_;
};

// Transfers all rows by one call of the process group.
class Collective final : public Transfer {
 public:
  Collective(std::function<Work()> call, int64_t sent_bytes) : call_(std::move(call)) { sent_bytes_ = sent_bytes; }

  void send() override {
    const WithoutPythonObjects without_python;
    arrivals_.push_back(call_());
  }

 private:
  std::function<Work()> call_;
};

}  // namespace

// Rows begin at multiples of 16 bytes, because NCCL copies byte by byte from and to other addresses.
at::Tensor Rows::of(const at::Tensor& buffer, int64_t row) const {
  TORCH_INTERNAL_ASSERT(begin(row) % 16 == 0, "row ", row, " of ", length, " bytes begins at no multiple of 16");
  return buffer.narrow(0, begin(row), length);
}

void Transfer::wait_for(Works& works) {
  while (!works.empty()) {
    const Work work = std::move(works.front());
    works.erase(works.begin());
    if (work) {  // some backends return none for a call of a group
      work->wait();
    }
  }
}

bool Transfer::have_come() const {
  return std::all_of(arrivals_.begin(), arrivals_.end(), [](const Work& work) { return !work || work->isCompleted(); });
}

void Transfer::wait_for_rows() {
  RECORD_FUNCTION("fastsync::wait", {});
  wait_for(arrivals_);
}

void Transfer::wait_until_sent() { wait_for(departures_); }

std::unique_ptr<Transfer> all_reduce(c10d::ProcessGroup& group, c10::Device device, const std::vector<Reduced>& all) {
  if (group.getSize() == 1) {
    return std::make_unique<Transfer>();
  }
  Transfer::Works works;
  int64_t sent_bytes = 0;
  const auto post = [&] {
    for (const Reduced& each : all) {
      c10d::AllreduceOptions options;
      options.reduceOp = each.op;
      sent_bytes += static_cast<int64_t>(each.buffer.nbytes());
      std::vector<at::Tensor> tensors{each.buffer};
      works.push_back(group.allreduce(tensors, options));
    }
  };
  if (all.size() > 1 && group.getBackend(device.type())->supportsCoalescing()) {
    coalesced(group, device, works, post);
  } else {
    post();
  }
  return std::make_unique<Transfer>(std::move(works), sent_bytes);
}

// Only a group that is bound to the device has its communicator by now, which lending takes. While a CUDA graph is
// captured, memory has to come from the graph's own pool.
at::Tensor new_buffer(c10d::ProcessGroup& group, int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  const auto backend = device.is_cpu() || group.getSize() == 1 ? nullptr : group.getBackend(device.type());
  const bool lends = backend && backend->getBoundDeviceId() == device && backend->supportsTensorAlloc(device.index()) &&
                     !is_capturing(device);
  return lends ? backend->allocateTensor(bytes, options) : at::empty({bytes}, options);
}

Team::Team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::vector<int64_t> ranks)
    : group_(std::move(group)),
      device_(device),
      ranks_(std::move(ranks)),
      rank_(std::find(ranks_.begin(), ranks_.end(), group_->getRank()) - ranks_.begin()),
      messages_are_fast_(device.is_cpu() && sends_by_gloo(*group_, device)),
      averages_by_factors_(!device.is_cpu() && is_nccl(backend_name(*group_, device))),
      has_collectives_(!device.is_cpu() && size() > 1 && size() == group_->getSize()) {
  TORCH_INTERNAL_ASSERT(rank_ < size(), "rank ", group_->getRank(), " is not in its team");
}

at::Tensor Team::allocate(int64_t bytes) { return new_buffer(*group_, bytes, device_).zero_(); }

// The first message is the one to the next rank, so that not all ranks send to the same rank first.
std::unique_ptr<Transfer> Team::messages(const at::Tensor& buffer, const Rows& from, const Rows& to, bool same_to_all,
                                         int tag) const {
  std::vector<Message> sent;
  std::vector<Message> expected;
  for (int64_t step = 1; step < size(); ++step) {
    const int64_t peer = (rank_ + step) % size();
    const auto rank = static_cast<int>(ranks_[peer]);
    sent.emplace_back(from.of(buffer, same_to_all ? rank_ : peer), rank);
    expected.emplace_back(to.of(buffer, peer), rank);
  }
  return std::make_unique<Messages>(group_, device_, std::move(sent), std::move(expected), tag);
}

std::unique_ptr<Transfer> Team::all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag) {
  if (!has_collectives_) {
    return messages(buffer, from, to, /*same_to_all=*/false, tag);
  }
  // Not alltoall_base, which takes no gaps between rows and copies the rank's own row. Here the rank's own row is input
  // and output, which NCCL skips.
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  for (int64_t row = 0; row < size(); ++row) {
    outputs.push_back(to.of(buffer, row));
    inputs.push_back(row == rank_ ? outputs.back() : from.of(buffer, row));
  }
  return std::make_unique<Collective>(
      [group = group_, inputs, outputs]() mutable { return group->alltoall(outputs, inputs); },
      (size() - 1) * from.length);
}

std::unique_ptr<Transfer> Team::all_gather(const at::Tensor& buffer, const Rows& rows, int tag) {
  if (!has_collectives_) {
    return messages(buffer, rows, rows, /*same_to_all=*/true, tag);
  }
  const Rows whole{rows.offset, rows.stride, rows.stride};  // the call knows no gaps between rows
  // This is the backend's method, because torch 2.13 deprecates the group's, and torch 2.11 lacks its successor.
  return std::make_unique<Collective>(
      [backend = group_->getBackend(device_.type()), mine = whole.of(buffer, rank_),
       all = buffer.narrow(0, rows.offset, size() * rows.stride)]() mutable {
        return backend->_allgather_base(all, mine);
      },
      (size() - 1) * rows.stride);
}

// Gloo does not serve CUDA: its futures carry no CUDA events, so nothing could be ordered after its collectives.
void check_device(c10d::ProcessGroup& group, c10::Device device) {
  const std::vector<c10::Device> served = group.getDeviceTypes();
  const bool is_served =
      std::any_of(served.begin(), served.end(), [&](c10::Device each) { return each.type() == device.type(); });
  TORCH_CHECK_VALUE(is_served && (device.is_cpu() || !sends_by_gloo(group, device)), "process_group: gradients are on ",
                    device, ", where it does not work; use a group whose backend ",
                    "does (Gloo for cpu, NCCL for cuda), as init_process_group('cpu:gloo,cuda:nccl') makes");
}

std::shared_ptr<Team> make_team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device) {
  check_device(*group, device);
  std::vector<int64_t> ranks(group->getSize());
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<Team>(std::move(group), device, std::move(ranks));
}

}  // namespace fastsync
