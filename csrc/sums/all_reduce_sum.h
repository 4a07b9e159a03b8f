// An AllReduceSum has the process group add up a bucket, in the wire's dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "sums/sum_work.h"
#include "transport/team.h"

namespace fastsync {

// Side values travel behind the gradients if the wire is float32 and has memory of its own. Else they travel in a
// collective of their own. The team is that of all ranks of the group.
class AllReduceSum final : public SumWork {
 public:
  // `kept` is the memory of the sum before, and is made anew if it does not fit. With is_lossless, the wire holds every
  // gradient as it is. With in_place, a single gradient of the wire's dtype is summed in its own memory, which nobody
  // else may use meanwhile.
  AllReduceSum(FlatGradients gradients, std::shared_ptr<const Team> team, at::Tensor& kept, bool is_lossless,
               bool in_place);

  void send() override;
  bool may_be_sent_again() const override { return true; }
  void receive(const std::function<void()>& on_reduced) override;
  int64_t sent_bytes() const override { return transfer_->sent_bytes(); }
  bool leaves_stats_out() const override { return leaves_stats_out_; }

 private:
  bool needs_no_packing() const;
  bool needs_no_unpacking() const;
  bool needs_nothing() const;

  const std::shared_ptr<const Team> team_;
  const bool is_lossless_;
  const bool is_in_place_;
  const bool is_idle_;        // whether there is nothing to do, for the gradients are the means
  const int64_t num_bytes_;   // the size of the gradients on the wire
  bool carries_side_values_;  // whether side values travel behind the gradients
  std::unique_ptr<Transfer> transfer_;
  bool leaves_stats_out_ = false;
};

}  // namespace fastsync
