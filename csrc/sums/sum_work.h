// The sum of one bucket over the ranks, under way: by a plan, see PlannedSum, or by the process group, see
// AllReduceSum.
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

  // Packs the gradients and sends them. Returns at once. Error feedback is lent before.
  virtual void send() = 0;
  // Whether send may be tried again after it has thrown. If not, messages of the first try may still be under way, and
  // would be taken for those of the second.
  virtual bool may_be_sent_again() const = 0;

  // Whether drive has anything to do.
  virtual bool needs_driving() const { return false; }
  // Adds up rows and sends the sums on, as they come. Any thread may call it. The first call does the work, and others
  // return at once. finish throws its errors.
  virtual void drive() {}
  // Drops a sum whose result nobody wants. What other ranks wait for is done all the same, in the background.
  static void abandon(std::unique_ptr<SumWork> sum);

  // Waits for the rest, calls on_reduced, and unpacks. From then on the bucket's side values are sums, perhaps in
  // memory that its next sum writes to.
  virtual void finish(const std::function<void()>& on_reduced) = 0;

  virtual int64_t sent_bytes() const = 0;  // after finish

 protected:
  void* address(int64_t offset) const { return advance(memory_.data_ptr(), offset); }
  void let_go_of_gradients();
  void use_memory_on_current_stream() const;

  FlatGradients gradients_;
  at::Tensor memory_;  // what travels lies in it

 private:
  const pid_t process_id_ = getpid();
};

}  // namespace fastsync
