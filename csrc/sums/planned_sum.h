// A PlannedSum runs a plan for one bucket, and so adds it up over the ranks of a team. See Note [Plans].
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "sums/plan.h"
#include "sums/sum_work.h"
#include "transport/streams.h"
#include "transport/team.h"

namespace fastsync {

// A bucket keeps this from sum to sum.
struct SumMemory {
  std::shared_ptr<const Plan> plan = nullptr;  // null if the process group adds
  std::optional<PlanKey> key = {};             // the key of the newest sum, even if it had no plan
  at::Tensor buffer = {};                      // rows, or the wire of an all-reduce, lie in it; undefined at first
};

class PlannedSum final : public SumWork {
 public:
  // Prepares a sum by the memory's plan. In shared memory it waits until nobody reads the rows of the sum before.
  PlannedSum(FlatGradients gradients, SumMemory& memory, const SumNumber& number);

  // Packs chunk after chunk. Each chunk is on its way before the next one is packed.
  void send() override;
  bool may_be_sent_again() const override;
  bool needs_driving() const override { return plan_->num_phases() > 1 && !has_driver_; }
  void drive() override;
  void receive(const std::function<void()>& on_reduced) override;
  int64_t sent_bytes() const override;

 private:
  static constexpr int kFailed = std::numeric_limits<int>::max();

  int index_of(const Chunk& chunk) const { return static_cast<int>(&chunk - plan_->chunks.data()); }
  std::unique_ptr<Transfer>& transfer(const Chunk& chunk, size_t phase);
  void expect(const Chunk& chunk, size_t phase);
  void drive_all();
  void set_driven(int num_chunks);
  void wait_until_driven(const Chunk& chunk);
  void reduce(const Chunk& chunk, const Phase& phase);
  void unpack_chunks(const std::function<void()>& on_reduced);
  void put_side_values(const Phase& phase) const;
  void sum_side_values(const Rows& rows);

  const std::shared_ptr<const Plan> plan_;
  std::shared_ptr<void> use_;                         // the result of SharedTeam::begin; null once all rows are read
  std::vector<std::unique_ptr<Transfer>> transfers_;  // by chunk and phase; null until their rows are expected

  bool keeps_own_ = false;  // see Note [Own values]

  std::atomic<bool> has_driver_ = false;
  std::atomic<int> num_driven_;  // how many chunks, from the first on, are in their last phase; kFailed after an error
  std::exception_ptr error_;     // the error of the thread that drives
  StreamMark driven_;            // how far the stream that drives has got
};

}  // namespace fastsync
