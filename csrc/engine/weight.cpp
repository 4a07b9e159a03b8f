#include "engine/weight.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "passes/cuda_graphs.h"
#include "transport/without_python_objects.h"

namespace fastsync {

void refuse_late_weight(const std::string& parameter) {
  TORCH_CHECK(false, "fastsync: set_weight() was called after a backward whose gradients, such as that of parameter ",
              parameter, ", no sync has averaged yet, and a weight counts for all that a sync averages: call it ",
              "once a step, before the first backward, with the number of the step's tokens or samples, and multiply ",
              "each micro-batch's mean loss by its part of them. Or call zero_grad() before");
}

WeightSum::WeightSum(const Weight& weight, bool sums, c10d::ProcessGroup& group, c10::Device device, bool has_failed)
    : sums_(sums), sent_(weight.value()) {
  TORCH_CHECK_VALUE(!is_capturing(device), "fastsync: a CUDA graph repeats the weights of the step that it captures, ",
                    "whatever set_weight() and join() say later: capture without them, and multiply the loss by a ",
                    "weight that is a tensor on ", device);
  const WithoutPythonObjects without_python;
  const at::Tensor on_host =
      at::empty({1 + group.getSize()}, at::TensorOptions().dtype(at::kDouble).pinned_memory(!device.is_cpu()));
  auto* const numbers = on_host.data_ptr<double>();
  std::fill_n(numbers, on_host.numel(), has_failed ? std::numeric_limits<double>::quiet_NaN() : 0.0);
  if (!has_failed) {
    numbers[0] = sent_;
    numbers[1 + group.getRank()] = weight.is_active() ? 1.0 : 0.0;
  }
  total_ = on_host.to(device, /*non_blocking=*/true);
  reduction_ = all_reduce(group, device, {{total_}});
}

bool WeightSum::has_come() {
  if (!total_.is_cpu() || reduction_->have_come()) {
    wait();
  }
  return has_come_;
}

// If all weights are 0, the mean is zeros. If a rank has failed, all numbers are nan, and so is the mean.
void WeightSum::wait() {
  if (has_come_) {
    return;
  }
  reduction_->wait_for_rows();
  const at::Tensor total = total_.narrow(0, 0, 1);
  active_ = total_.narrow(0, 1, total_.numel() - 1);
  factor_ = sums_ ? at::full_like(total, sent_)
                  : at::where(total == 0.0, 0.0, at::full_like(total, sent_ * active_.numel()).div(total));
  if (factor_.is_cpu() && factor_.item<double>() == 1.0) {
    factor_.reset();
  }
  taken_.set(total_.device());
  has_come_ = true;
}

at::Tensor WeightSum::factor(c10::Device device) const {
  return factor_.defined() ? factor_.to(device, /*non_blocking=*/true) : factor_;
}

void WeightSum::wait_on_stream() const {
  taken_.wait();
  use_on_current_stream(total_);
  use_on_current_stream(factor_);
}

}  // namespace fastsync
