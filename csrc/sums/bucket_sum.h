// Runs a plan for one bucket: its sum over the ranks of a team. See Note [Plans].
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "sums/bucket.h"
#include "sums/plan.h"
#include "transport/progress_thread.h"
#include "transport/team.h"

namespace fastsync {

// What a bucket keeps from sum to sum.
struct SumMemory {
  std::shared_ptr<const Plan> plan;
  std::optional<PlanKey> key = {};  // another plan has fresh memory
  at::Tensor bytes = {};            // that the plan's rows lie in; undefined until its first sum
};

class BucketSum {
 public:
  // By the memory's plan.
  BucketSum(Bucket bucket, SumMemory& memory);
  BucketSum(const BucketSum&) = delete;
  BucketSum& operator=(const BucketSum&) = delete;

  // Before send, for error feedback.
  Bucket& bucket() { return bucket_; }

  // Packs chunk after chunk, each on its way before the next one is packed. Returns at once. Where it throws, messages
  // that other ranks have sent by then may be under way, and would be taken for those of another try.
  void send();
  bool may_be_sent_again() const {
    return plan_->is_all_reduce || plan_->team->shares_memory() || !bucket_.device.is_cpu();
  }

  // Does what comes between the first messages and the last ones, if anything does. From any thread, the first of which
  // does it; others return at once. What goes wrong is thrown by finish.
  bool needs_driving() const { return plan_->num_phases() > 1; }
  void drive();
  // Nobody wants the result: what others wait for is done all the same, in the background.
  static void abandon(std::unique_ptr<BucketSum> sum);

  // Waits for the rest, calls on_reduced, and unpacks. The bucket's side values are sums from then on. They may lie in
  // memory that its next sum writes to.
  void finish(const std::function<void()>& on_reduced);

  int64_t sent_bytes() const;  // after finish

 private:
  int index_of(const Chunk& chunk) const { return static_cast<int>(&chunk - plan_->chunks.data()); }
  void* address(int64_t offset) const { return advance(memory_.data_ptr(), offset); }
  std::unique_ptr<Transfer>& transfer(const Chunk& chunk, size_t phase);
  void expect(const Chunk& chunk, size_t phase);
  void send_to_group(const Chunk& chunk);
  void pack(const Chunk& chunk) const;
  void drive_all();
  void set_driven(int num_chunks);
  void reduce(const Chunk& chunk, const Reduce& reduce, const Rows& from, const Phase& next);
  void receive(const std::function<void()>& on_reduced);
  void wait_until_driven(const Chunk& chunk);
  void let_go_of_gradients();
  void put_side_values(const Phase& phase) const;
  void sum_side_values(const Rows& rows, int64_t count);
  void unpack(const Chunk& chunk) const;
  void use_memory() const;

  Bucket bucket_;
  const std::shared_ptr<const Plan> plan_;
  at::Tensor memory_;
  std::shared_ptr<void> use_;                         // of the memory
  std::vector<std::unique_ptr<Transfer>> transfers_;  // by chunk and phase; null until they are expected

  static constexpr int kFailed = std::numeric_limits<int>::max();

  const pid_t process_id_ = getpid();
  std::atomic<bool> has_driver_ = false;
  std::atomic<int> num_driven_;  // of the chunks, the first ones; kFailed once there is an error
  std::exception_ptr error_;
  StreamMark driven_;
};

}  // namespace fastsync
