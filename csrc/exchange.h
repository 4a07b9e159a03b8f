// Messages that ranks of a group send each other, beside whatever collectives the group is used for.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace fastsync {

// What the process group is given while this lives becomes one launch, at end. Whatever fails in between, the thread's
// group does not stay open: what came after it would neither be launched nor waited for.
class Coalescing {
 public:
  Coalescing(c10d::ProcessGroup& group, c10::Device device);
  ~Coalescing();
  Coalescing(const Coalescing&) = delete;
  Coalescing& operator=(const Coalescing&) = delete;

  c10::intrusive_ptr<c10d::Work> end();

 private:
  c10d::ProcessGroup& group_;
  c10::DeviceGuard guard_;  // the backend asks for the current device where nothing else tells it
  bool is_open_ = true;
};

// Every rank expects what the others send, in the same sizes. Messages of one tag arrive in the order in which they
// were sent. On a CPU a message is on its way as soon as both sides have named it, and those expected first travel
// without asking; on CUDA all of them are one launch on the group's stream, at start.
class Exchange {
 public:
  Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag);

  void expect(at::Tensor message, int64_t from);
  void send(at::Tensor message, int64_t to);
  void start();

  // Until all have come and gone; on CUDA the current stream waits.
  void wait();

  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  using Message = std::pair<at::Tensor, int>;

  c10::intrusive_ptr<c10d::Work> post_receive(Message& message);
  c10::intrusive_ptr<c10d::Work> post_send(Message& message);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  int tag_;
  std::vector<Message> expected_;
  std::vector<Message> sent_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  int64_t sent_bytes_ = 0;
};

}  // namespace fastsync
