// How much a rank's gradients count in the mean, and which ranks still have any. Once somebody has asked for weights,
// they travel before the gradients, in a collective of their own: so packing knows what part of the mean each rank's
// gradients are, and nothing that follows from their magnitude depends on the weights'.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <optional>

#include "transport/progress_thread.h"
#include "transport/team.h"

namespace fastsync {

// This rank's weight, from one step to the next.
class Weight {
 public:
  bool is_on() const { return value_.has_value() || is_joining_; }
  bool is_set() const { return value_.has_value(); }
  bool is_joining() const { return is_joining_; }
  void set(double value) { value_ = value; }

  // While ranks join, one that has run out of gradients counts for nothing.
  void set_joining(bool is_joining) {
    is_joining_ = is_joining;
    is_active_ |= !is_joining;  // a rank without any gradients has run out before
  }
  void run_out() { is_active_ = false; }
  bool is_active() const { return is_active_; }

  double value() const { return is_active_ ? value_.value_or(1.0) : 0.0; }

 private:
  std::optional<double> value_;
  bool is_joining_ = false;
  bool is_active_ = true;
};

// The weights of all ranks in one step: sent when it is made, and added up.
class WeightSum {
 public:
  // sums: gradients become a sum and not a mean. A rank that has failed sends nan, and must not wait.
  WeightSum(const Weight& weight, bool sums, c10d::ProcessGroup& group, c10::Device device, bool has_failed);

  // Never waits. On a device the current stream does.
  bool has_come();
  void wait();
  int64_t sent_bytes() const { return reduction_->sent_bytes(); }

  // The rest is for when it has come.

  // The current stream may use it from now on.
  void use() const;
  // The factor that makes the mean of all ranks' gradients the weighted mean, or their sum the weighted sum. This
  // rank's are multiplied with it: float64 [1], undefined if it is 1.
  at::Tensor factor(c10::Device device) const;
  // 1 for each rank that still has gradients, else 0; nan from one that has failed: float64.
  const at::Tensor& active() const { return active_; }

 private:
  const bool sums_;
  double sent_;
  bool has_come_ = false;
  std::unique_ptr<Transfer> reduction_;
  at::Tensor total_;   // the sum of the weights, and behind it what active() returns
  at::Tensor active_;  // set, as the next two, once it has come
  at::Tensor factor_;
  StreamMark taken_;
};

}  // namespace fastsync
