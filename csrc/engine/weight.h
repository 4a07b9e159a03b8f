// How much a rank's gradients count in the mean, and which ranks still have any: float32 values that travel behind the
// riders, where somebody has asked for weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastsync {

class Weight {
 public:
  bool is_on() const { return value_.has_value() || is_joining_; }
  bool is_set() const { return value_.has_value(); }
  bool is_joining() const { return is_joining_; }
  void set(double value) { value_ = value; }

  // While ranks join, one that has no gradients any more counts for nothing.
  void set_joining(bool is_joining) {
    is_joining_ = is_joining;
    is_active_ |= !is_joining;  // a rank without any gradients has run out before
    factor_.reset();
    active_.reset();
  }
  void run_out() { is_active_ = false; }
  bool is_active() const { return is_active_; }

  // Multiplies what this rank sends.
  void apply(std::vector<at::Tensor>& grads) const;

  // The riders, with these behind them, empty where riders stay empty.
  at::Tensor board(const at::Tensor& riders, int64_t rank, int64_t world_size, c10::Device device,
                   bool stay_empty) const;
  // From the sums over the ranks of what board returned; returns those of the riders.
  at::Tensor arrive(const at::Tensor& sums, int64_t world_size);

  // What the newest mean is to be multiplied with, a scalar on its device. Undefined where that is 1.
  const at::Tensor& factor() const { return factor_; }
  // How many ranks still had gradients; nan where one has failed. Waits for the device.
  double num_active() const { return active_.sum().item<double>(); }
  // The mean over these of what the others have sent zeros for.
  at::Tensor mean(const at::Tensor& sums, int64_t world_size) const;
  // The values on the first of those that had some in the sync before, zeros on the others.
  at::Tensor of_first_active(const at::Tensor& values, int64_t rank) const;

 private:
  double value() const { return is_active_ ? value_.value_or(1.0) : 0.0; }

  std::optional<double> value_;
  bool is_joining_ = false;
  bool is_active_ = true;
  at::Tensor factor_;
  at::Tensor active_;  // one for each rank, 1 or 0
};

}  // namespace fastsync
