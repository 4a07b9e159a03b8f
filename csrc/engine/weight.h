// A weight tells how much a rank's gradients count in the mean, and whether the rank still has any. Once somebody has
// asked for weights, they travel before the gradients, in a collective of their own. So packing knows what part of the
// mean this rank's gradients are. Nothing that follows from the gradients' magnitude then depends on the weights'
// magnitude.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "engine/passenger.h"
#include "transport/streams.h"
#include "transport/team.h"

namespace fastsync {

constexpr auto kAddingWeights = "adding up the ranks' weights";  // what errors say

// This rank's weight, from one step to the next. As a passenger it learns which ranks have run out.
class Weight final : public Passenger {
 public:
  bool is_on() const { return value_.has_value() || is_joining_; }
  bool is_set() const { return value_.has_value(); }
  bool is_joining() const { return is_joining_; }
  void set(double value) { value_ = value; }

  // While ranks join, a rank that has run out of gradients has the weight 0.
  void set_joining(bool is_joining) {
    is_joining_ = is_joining;
    is_active_ |= !is_joining;  // a rank without any gradients has run out before
  }
  void set_active(bool is_active) { is_active_ = is_active; }
  bool is_active() const { return is_active_; }

  double value() const { return is_active_ ? value_.value_or(1.0) : 0.0; }

  void take(const Sums& /*sums*/, const StepInfo& step) override {
    if (!step.has_failed && step.active.defined()) {
      active_ = step.active;
    }
  }
  // The number of ranks that had not run out in the newest step with weights; nan if one has failed. Waits for the
  // device.
  double num_active() const { return active_.sum().item<double>(); }

 private:
  at::Tensor active_;
  std::optional<double> value_;
  bool is_joining_ = false;
  bool is_active_ = true;
};

// Throws c10::Error: a weight was set when the parameter had a gradient that no sync has averaged.
[[noreturn]] void refuse_late_weight(const std::string& parameter);

// Adds up the weights of all ranks in one step. The constructor sends this rank's weight.
class WeightSum {
 public:
  // With `sums`, gradients become a sum and not a mean. A rank that has failed sends nan, and must not wait.
  WeightSum(const Weight& weight, bool sums, c10d::ProcessGroup& group, c10::Device device, bool has_failed);

  // Whether the weights have come. On a CPU it does not wait. On CUDA the current stream waits, and it returns true.
  bool has_come();
  void wait();
  int64_t sent_bytes() const { return reduction_->sent_bytes(); }

  // The other methods need weights that have come.

  // Makes the current stream wait for the weights, so that it may use them from now on.
  void wait_on_stream() const;
  // The factor of this rank's gradients: float64 [1], undefined if it is 1. It makes the mean over the ranks the
  // weighted mean, or the sum the weighted sum.
  at::Tensor factor(c10::Device device) const;
  // A float64 for each rank: 1 if the rank still has gradients, else 0; nan if a rank has failed.
  const at::Tensor& active() const { return active_; }

 private:
  const bool sums_;
  double sent_;
  bool has_come_ = false;
  std::unique_ptr<Transfer> reduction_;
  at::Tensor total_;  // the sum of the weights, and behind it what active() returns

  // These are set once the weights have come.
  at::Tensor active_;
  at::Tensor factor_;
  StreamMark taken_;
};

}  // namespace fastsync
