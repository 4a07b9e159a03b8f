// A SumWork is the sum of one bucket over the ranks, while it is under way. A PlannedSum runs a plan, an AllReduceSum
// leaves the sum to the process group, a LowRankSum makes two of them, and a SparseSum gathers rows.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "sums/flat_gradients.h"

namespace fastsync {

class SumWork {
 public:
  explicit SumWork(FlatGradients gradients);
  virtual ~SumWork() = default;
  SumWork(const SumWork&) = delete;
  SumWork& operator=(const SumWork&) = delete;

  FlatGradients& gradients() { return gradients_; }
  // Whether this process made the sum, and did not get it by a fork.
  bool is_of_this_process() const { return getpid() == process_id_; }

  // Packs the gradients and sends them. Returns at once. ErrorFeedback::apply_to comes before it.
  virtual void send() = 0;
  // Whether send may be tried again after it has thrown. If not, messages of the first try may still be under way, and
  // would be taken for those of the second.
  virtual bool may_be_sent_again() const = 0;

  // Whether drive has anything to do.
  virtual bool needs_driving() const { return false; }
  // Does what comes between phases: waits for rows, adds them up and sends the sums on. Any thread may call it. The
  // first call does the work, and others return at once. receive throws its errors.
  virtual void drive() {}
  // Drops a sum whose result nobody wants. In the background it still does what other ranks wait for.
  static void abandon(std::unique_ptr<SumWork> sum);

  // Whether receive sends as well. Then all ranks have to receive their sums in one order, while nothing else is sent.
  virtual bool receive_sends() const { return false; }
  // Waits until the sum has come, calls on_reduced, and unpacks. From then on gradients().side_values are sums, perhaps
  // in memory that the bucket's next sum writes to.
  virtual void receive(const std::function<void()>& on_reduced) = 0;

  virtual int64_t sent_bytes() const = 0;  // valid after receive
  // After receive: whether it has left out the statistics, because nobody needs them and nothing else was left to do.
  virtual bool leaves_stats_out() const { return false; }

 protected:
  void* address(int64_t offset) const { return advance(memory_.data_ptr(), offset); }
  void let_go_of_gradients();
  void use_memory_on_current_stream() const;

  FlatGradients gradients_;
  at::Tensor memory_;  // rows, or the wire of an all-reduce, lie in it

 private:
  const pid_t process_id_ = getpid();
};

}  // namespace fastsync
