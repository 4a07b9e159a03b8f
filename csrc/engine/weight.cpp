#include "engine/weight.h"

#include <ATen/ATen.h>

#include <limits>

namespace fastsync {

namespace {

constexpr int64_t kNumbers = 2;

}  // namespace

// Gradients that count for nothing may be anything.
void Weight::apply(std::vector<at::Tensor>& grads) const {
  if (value() == 0.0) {
    at::_foreach_zero_(grads);
  } else if (value() != 1.0) {
    at::_foreach_mul_(grads, value());
  }
}

at::Tensor Weight::board(const at::Tensor& riders, c10::Device device, bool stay_empty) const {
  constexpr double kEmpty = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> numbers{stay_empty ? kEmpty : value(), stay_empty ? kEmpty : (is_active_ ? 1.0 : 0.0)};
  const at::Tensor both = at::tensor(numbers, at::kFloat).to(device, /*non_blocking=*/true);
  return riders.defined() ? at::cat({riders, both}) : both;
}

at::Tensor Weight::arrive(const at::Tensor& sums, int64_t world_size) {
  const int64_t num_riders = sums.numel() - kNumbers;
  num_active_ = sums.select(0, num_riders + 1).clone();
  const at::Tensor total = sums.select(0, num_riders).to(at::kDouble);
  // Where nobody counts for anything the result is zeros. What is not finite arrives as it is.
  factor_ = at::where(total == 0.0, 0.0, total.reciprocal().mul(world_size));
  if (factor_.is_cpu() && factor_.item<double>() == 1.0) {
    factor_.reset();
  }
  return sums.narrow(0, 0, num_riders);
}

}  // namespace fastsync
