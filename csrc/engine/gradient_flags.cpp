#include "engine/gradient_flags.h"

#include <ATen/ATen.h>

namespace fastsync {

void GradientFlags::check(const Sums& sums, const StepInfo& step) {
  sums_ = sums;
  num_waits_ = counts_.defined() ? num_waits_ + 1 : 0;
  is_captured_ = step.is_captured;
  if (!is_captured_) {
    counts_.reset();
  }
}

bool GradientFlags::on_some_rank(size_t flag, const std::string& parameter) {
  constexpr int64_t kManyWaits = 100;
  if (flags_[flag] == 1.0F) {
    return true;
  }
  if (!counts_.defined()) {
    TORCH_CHECK(!is_captured_, "fastsync: parameter ", parameter, " has no gradient here, and whether another rank ",
                "has one cannot be found out while a CUDA graph is captured: take a step like this one before");
    counts_ = sums_.tensor().to(at::kCPU);
  }
  const bool exists = counts_.const_data_ptr<float>()[flag] > 0.5F;
  if (!exists && num_waits_ == kManyWaits && !sums_.row.is_cpu()) {
    num_waits_ += 1;  // so that the warning comes once
    TORCH_WARN("fastsync: parameter ", parameter, " has had no gradient on any rank for ", kManyWaits,
               " steps. Each step the host waits for the device to find that out; freeze what is not used ",
               "(requires_grad_(False)), and it no longer does");
  }
  return exists;
}

}  // namespace fastsync
