#include "engine/unused_parameters.h"

#include <utility>

#include "passes/backend.h"

namespace fastsync {

void UnusedParameters::lay_out(size_t num_places, int64_t num_ranks) {
  none_ = 1.0F / (8.0F * static_cast<float>(num_ranks));
  here_.assign(num_places, none_);
  flags_.reset();
}

at::Tensor UnusedParameters::flags(std::optional<std::vector<float>> stamp, c10::Device device) {
  has_new_stamp_ = stamp.has_value();
  if (has_new_stamp_) {
    stamp_ = std::move(*stamp);
  }
  std::vector<float> flags = here_;
  flags.insert(flags.end(), stamp_.begin(), stamp_.end());
  if (!flags_.defined() || flags != flagged_) {
    TORCH_CHECK(!is_capturing(device), "fastsync: other parameters have a gradient in the step that a CUDA graph ",
                "captures than in the one before it: take a step like this one before");
    flags_ = to_device(flags, device);
    flagged_ = std::move(flags);
  }
  if (is_capturing(device)) {
    captured_flags_.push_back(flags_);
  }
  return flags_;
}

void UnusedParameters::arrive(bool is_captured) {
  num_waits_ = counts_.defined() ? num_waits_ + 1 : 0;
  is_captured_ = is_captured;
  if (!is_captured) {
    counts_.reset();
  }
}

at::Tensor UnusedParameters::stamps(const at::Tensor& sums) const {
  const auto size = static_cast<int64_t>(stamp_.size());
  return has_new_stamp_ ? sums.narrow(0, sums.numel() - size, size) : at::Tensor();
}

bool UnusedParameters::on_some_rank(size_t place, const at::Tensor& sums, const std::string& parameter) {
  constexpr int64_t kManyWaits = 100;
  if (is_here(place)) {
    return true;
  }
  if (!counts_.defined()) {
    TORCH_CHECK(!is_captured_, "fastsync: parameter ", parameter, " has no gradient here, and whether another rank ",
                "has one cannot be found out while a CUDA graph is captured: take a step like this one before");
    counts_ = sums.to(at::kCPU, at::kFloat);
  }
  const bool exists = counts_.const_data_ptr<float>()[place] > 0.5F;
  if (!exists && num_waits_ == kManyWaits && !sums.is_cpu()) {
    num_waits_ += 1;  // said once
    TORCH_WARN("fastsync: parameter ", parameter, " has had no gradient on any rank for ", kManyWaits,
               " steps. Each step the host waits for the device to find that out; freeze what is not used ",
               "(requires_grad_(False)), and it no longer does");
  }
  return exists;
}

}  // namespace fastsync
