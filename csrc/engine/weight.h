// How much a rank's gradients count in the mean, and which ranks still have any. Where somebody has asked for weights,
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

class Weight {
 public:
  explicit Weight(bool is_of_sums) : is_of_sums_(is_of_sums) {}

  bool is_on() const { return value_.has_value() || is_joining_; }
  bool is_set() const { return value_.has_value(); }
  bool is_joining() const { return is_joining_; }
  void set(double value) { value_ = value; }

  // While ranks join, one that has no gradients any more counts for nothing.
  void set_joining(bool is_joining) {
    is_joining_ = is_joining;
    is_active_ |= !is_joining;  // a rank without any gradients has run out before
    active_.reset();
  }
  void run_out() { is_active_ = false; }
  bool is_active() const { return is_active_; }

  // One sync: begin, then post, which sends what others wait for and returns at once, then has_come, which never waits,
  // or wait. One that failed posts poison, and waits for nobody.
  void begin();
  bool is_posted() const { return is_posted_; }
  void post(c10d::ProcessGroup& group, c10::Device device, bool is_poisoned);
  bool has_come();
  void wait();
  int64_t sent_bytes() const { return reduction_ ? reduction_->sent_bytes() : 0; }

  // What follows is for after that. On a device: once the current stream may use it.
  void use() const;
  // What this rank's gradients are multiplied with, so that the mean over all ranks is the weighted one, or the sum is
  // the weighted sum: float64 [1], undefined where it is 1.
  at::Tensor factor(c10::Device device) const;
  // How many ranks still had gradients; nan where one has failed. Waits for the device.
  double num_active() const { return active_.sum().item<double>(); }
  // The mean over these of what the others have sent zeros for.
  at::Tensor mean(const at::Tensor& sums, int64_t world_size) const;
  // Whether this rank is the first of those: a bool on the device.
  at::Tensor is_first_active(int64_t rank, c10::Device device) const;

 private:
  double value() const { return is_active_ ? value_.value_or(1.0) : 0.0; }

  const bool is_of_sums_;
  std::optional<double> value_;
  bool is_joining_ = false;
  bool is_active_ = true;

  // Of the newest sync.
  bool is_posted_ = false;
  bool has_come_ = false;
  double posted_ = 1.0;
  std::unique_ptr<Transfer> reduction_;
  at::Tensor sums_;    // float64: of the weights, and 1 or 0 for each rank that has gradients or not
  at::Tensor active_;  // those
  at::Tensor factor_;
  StreamMark taken_;
};

}  // namespace fastsync
