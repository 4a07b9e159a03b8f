#include "engine/side_values.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

#include "passes/backend.h"
#include "passes/graph_memory.h"

namespace fastsync {

at::Tensor SideValues::to_send(std::optional<std::vector<float>> stamp, const at::Tensor& weight, bool counts,
                               bool has_failed, c10::Device device) {
  has_new_stamp_ = stamp.has_value();
  if (has_new_stamp_) {
    stamp_ = std::move(*stamp);
  }
  std::vector<at::Tensor> all = named.to_send(counts, has_failed, device);
  const at::Tensor fixed = this->fixed(has_failed, device);
  if (counts_users) {
    const at::Tensor is_new = fixed.narrow(0, 0, num_flags()).eq(1.0F).to(at::kFloat);
    all.insert(all.begin(), weight.defined() ? is_new.mul_(weight) : is_new);
  }
  all.insert(all.begin(), fixed);
  return all.size() == 1 ? all.front() : at::cat(all);
}

// Copies them to the device only when they change. A CUDA graph cannot do that.
at::Tensor SideValues::fixed(bool has_failed, c10::Device device) {
  std::vector<float> fixed = flags.values();
  fixed.insert(fixed.end(), stamp_.begin(), stamp_.end());
  if (signal) {
    fixed.push_back(has_failed ? std::numeric_limits<float>::quiet_NaN() : *signal);
  }
  if (!fixed_on_device_.defined() || fixed_on_device_.device() != device || fixed != fixed_) {
    TORCH_CHECK(!is_capturing(device), "fastsync: other parameters have a gradient in the step that a CUDA graph ",
                "captures than in the one before it: take a step like this one before");
    fixed_on_device_ = to_device(fixed, device);
    fixed_ = std::move(fixed);
  }
  hold_for_graph(device, {fixed_on_device_});
  return fixed_on_device_;
}

void SideValues::arrive(const at::Tensor& sums, bool is_captured) {
  sums_ = sums;
  flags.arrive(sums, is_captured);
}

double SideValues::signals() const {
  const int64_t at = num_fixed() - 1;
  // Without torch's operations it takes a nanosecond, in place of microseconds.
  return sums_.is_cpu() && sums_.is_contiguous() ? sums_.const_data_ptr<float>()[at] : sums_[at].item<double>();
}

at::Tensor SideValues::stamps() const {
  const auto size = static_cast<int64_t>(stamp_.size());
  return has_new_stamp_ ? sums_.narrow(0, num_flags(), size) : at::Tensor();
}

}  // namespace fastsync
