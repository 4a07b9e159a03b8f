#include "engine/weight.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "passes/backend.h"
#include "transport/without_python_objects.h"

namespace fastsync {

void Weight::begin() {
  is_posted_ = has_come_ = false;
  reduction_.reset();
}

void Weight::post(c10d::ProcessGroup& group, c10::Device device, bool is_poisoned) {
  TORCH_CHECK_VALUE(!is_capturing(device), "fastsync: a CUDA graph repeats the weights of the step that it captures, ",
                    "whatever set_weight() and join() say later: capture without them, and multiply the loss by a ",
                    "weight that is a tensor on ", device);
  const WithoutPythonObjects without_python;
  posted_ = value();
  const at::Tensor on_host =
      at::empty({1 + group.getSize()}, at::TensorOptions().dtype(at::kDouble).pinned_memory(!device.is_cpu()));
  auto* const numbers = on_host.data_ptr<double>();
  std::fill_n(numbers, on_host.numel(), is_poisoned ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  if (!is_poisoned) {
    numbers[0] = posted_;
    numbers[1 + group.getRank()] = is_active_ ? 1.0 : 0.0;
  }
  sums_ = on_host.to(device, /*non_blocking=*/true);
  reduction_ = all_reduce(group, device, {sums_});
  is_posted_ = true;
}

// A device's stream waits, and not its host.
bool Weight::has_come() {
  if (is_posted_ && (!sums_.is_cpu() || reduction_->have_come())) {
    wait();
  }
  return has_come_;
}

// Where nobody counts for anything the mean is zeros. What is not finite arrives as it is.
void Weight::wait() {
  if (has_come_) {
    return;
  }
  reduction_->wait_for_rows();
  const at::Tensor total = sums_.narrow(0, 0, 1);
  active_ = sums_.narrow(0, 1, sums_.numel() - 1);
  factor_ = is_of_sums_ ? at::full_like(total, posted_)
                        : at::where(total == 0.0, 0.0, at::full_like(total, posted_ * active_.numel()).div(total));
  if (factor_.is_cpu() && factor_.item<double>() == 1.0) {
    factor_.reset();
  }
  taken_.set(sums_.device());
  has_come_ = true;
}

at::Tensor Weight::factor(c10::Device device) const {
  return factor_.defined() ? factor_.to(device, /*non_blocking=*/true) : factor_;
}

void Weight::use() const {
  if (!has_come_) {
    return;
  }
  taken_.wait();
  use_on_current_stream(sums_);
  use_on_current_stream(factor_);
}

at::Tensor Weight::mean(const at::Tensor& sums, int64_t world_size) const {
  return active_.defined() ? sums.div(active_.sum().to(sums.device())) : sums.div(world_size);
}

at::Tensor Weight::is_first_active(int64_t rank, c10::Device device) const {
  return active_.defined() ? (active_.argmax() == rank).to(device)
                           : at::full({}, rank == 0, at::TensorOptions().dtype(at::kBool).device(device));
}

}  // namespace fastsync
