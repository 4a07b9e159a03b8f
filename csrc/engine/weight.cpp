#include "engine/weight.h"

#include <ATen/ATen.h>

#include <limits>

namespace fastsync {

// Gradients that count for nothing may be anything.
void Weight::apply(std::vector<at::Tensor>& grads) const {
  if (value() == 0.0) {
    at::_foreach_zero_(grads);
  } else if (value() != 1.0) {
    at::_foreach_mul_(grads, value());
  }
}

at::Tensor Weight::board(const at::Tensor& riders, int64_t rank, int64_t world_size, c10::Device device,
                         bool stay_empty) const {
  std::vector<double> numbers(1 + world_size, stay_empty ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  if (!stay_empty) {
    numbers[0] = value();
    numbers[1 + rank] = is_active_ ? 1.0 : 0.0;
  }
  const at::Tensor all = at::tensor(numbers, at::kFloat).to(device, /*non_blocking=*/true);
  return riders.defined() ? at::cat({riders, all}) : all;
}

at::Tensor Weight::arrive(const at::Tensor& sums, int64_t world_size) {
  const int64_t num_riders = sums.numel() - 1 - world_size;
  active_ = sums.narrow(0, num_riders + 1, world_size).clone();
  const at::Tensor total = sums.select(0, num_riders).to(at::kDouble);
  // Where nobody counts for anything the result is zeros, but where nobody has gradients, what error feedback has kept.
  // What is not finite arrives as it is.
  factor_ = at::where(total == 0.0, active_.sum().eq(0.0), total.reciprocal().mul(world_size));
  if (factor_.is_cpu() && factor_.item<double>() == 1.0) {
    factor_.reset();
  }
  return sums.narrow(0, 0, num_riders);
}

at::Tensor Weight::mean(const at::Tensor& sums, int64_t world_size) const {
  return active_.defined() ? sums.div(active_.sum()) : sums.div(world_size);
}

at::Tensor Weight::of_first_active(const at::Tensor& values, int64_t rank) const {
  if (active_.defined()) {
    return at::where(active_.argmax() == rank, values, 0.0);
  }
  return rank == 0 ? values : at::zeros_like(values);
}

}  // namespace fastsync
