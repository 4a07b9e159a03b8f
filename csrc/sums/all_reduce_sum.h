// A sum that the process group takes, in the wire's dtype.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "sums/bucket_sum.h"
#include "transport/team.h"

namespace fastsync {

// Side values travel behind the gradients of a float32 wire in memory of its own, else in a collective of their own.
class AllReduceSum final : public BucketSum {
 public:
  // Takes the memory that the bucket keeps from sum to sum, and makes it if it does not fit. in_place: a single
  // gradient of the wire's dtype is summed in its own memory, which nobody else may use meanwhile.
  AllReduceSum(Bucket bucket, std::shared_ptr<Team> team, at::Tensor& kept, bool in_place);

  void send() override;
  bool may_be_sent_again() const override { return true; }
  void finish(const std::function<void()>& on_reduced) override;
  int64_t sent_bytes() const override { return transfer_->sent_bytes(); }

 private:
  std::vector<Range> all_values() const { return {{0, bucket_.num_values, /*offset=*/0}}; }

  const std::shared_ptr<Team> team_;
  const bool is_in_place_;
  const bool has_room_;      // for side values behind the gradients
  const int64_t num_bytes_;  // of the gradients on the wire
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace fastsync
