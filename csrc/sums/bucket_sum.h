// The sum of one bucket over the ranks of a team, whoever adds.
#pragma once

#include <ATen/core/ivalue.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "sums/bucket.h"
#include "sums/plan.h"
#include "transport/progress_thread.h"
#include "transport/team.h"

namespace fastsync {

class BucketSum {
 public:
  explicit BucketSum(Bucket bucket) : bucket_(std::move(bucket)), side_values_(bucket_.side_values) {}
  virtual ~BucketSum() = default;
  BucketSum(const BucketSum&) = delete;
  BucketSum& operator=(const BucketSum&) = delete;

  // Before send, for error feedback.
  Bucket& bucket() { return bucket_; }
  virtual Owned owned() const { return {}; }

  // Packs piece after piece, each on its way before the next one is packed. Returns at once. Where a piece fails that
  // others expect by message, check_sent throws why, and the sum is to be finished like any other.
  virtual void send() = 0;
  bool failed_to_send() const { return failure_to_send_ != nullptr; }
  void check_sent() const {
    if (failed_to_send()) {
      std::rethrow_exception(failure_to_send_);
    }
  }

  // Does what comes between the first messages and the last ones, if anything does. From any thread, the first of which
  // does it. What goes wrong is thrown by finish.
  virtual bool needs_driving() const { return false; }
  void drive();
  // Nobody wants the result: what others wait for is done all the same, in the background.
  static void abandon(std::unique_ptr<BucketSum> sum);

  // After send: what says that nothing is left to wait for, null where nobody does. See Reduction.
  virtual Reduction::Future when_over() { return {}; }

  // Waits for the rest, calls on_reduced, and unpacks.
  void finish(const std::function<void()>& on_reduced);

  // Their sums, after finish. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return side_values_; }
  int64_t sent_bytes() const { return sent_bytes_; }

 protected:
  virtual void drive_all() {}
  // After a failure, so that nobody waits for this rank.
  virtual void give_up() {}
  virtual void receive(const std::function<void()>& on_reduced) = 0;
  // Has memory that was made on another stream stay until the current one is done with it.
  virtual void use_memory() const = 0;

  Bucket bucket_;
  at::Tensor side_values_;  // the bucket's until they are summed
  int64_t sent_bytes_ = 0;
  std::exception_ptr failure_to_send_;

 private:
  const pid_t process_id_ = getpid();
  std::mutex mutex_;  // held while driving
  bool is_driven_ = false;
  StreamMark driven_;
  std::exception_ptr error_;
};

// What is kept from sum to sum.
struct SumMemory {
  at::Tensor bytes;
  std::vector<int64_t> layout;  // that it was cleared for
};

// By the process group, in the wire's dtype. is_for_future: somebody may ask when it is over, and nobody else uses the
// gradients until then; so a single one of the wire's dtype is its own wire. Side values travel behind the gradients of
// a float32 wire that is memory of its own, else in a collective of their own.
std::unique_ptr<BucketSum> all_reduce_sum(std::shared_ptr<Team> team, Bucket bucket, SumMemory& memory,
                                          bool is_for_future);
bool is_own_wire(const std::vector<at::Tensor>& grads, DType wire);

// By the ranks, as planned for the bucket.
std::unique_ptr<BucketSum> planned_sum(Plan plan, Bucket bucket, SumMemory& memory);

}  // namespace fastsync
