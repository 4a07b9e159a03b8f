// Gradient flags tell which parameters have a gradient on some rank. They are numbers that are summed over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/passenger.h"

namespace fastsync {

// The first passenger of all. A parameter's flag is 1 if it has a new gradient, and 0 if it has a gradient of an
// earlier sync. If it has none, its flag is so small that the flags of all ranks together are less than 1/2.
class GradientFlags final : public Passenger {
 public:
  void lay_out(size_t num_flags, int64_t num_ranks) {
    none_ = 1.0F / (8.0F * static_cast<float>(num_ranks));
    flags_.assign(num_flags, none_);
  }

  // ---- before a sync ----

  // No parameter has a gradient at first.
  void begin(const StepInfo& /*step*/) override { flags_.assign(flags_.size(), none_); }
  void set(size_t flag, bool is_new, bool exists) { flags_[flag] = is_new ? 1.0F : (exists ? 0.0F : none_); }
  void add_numbers(std::vector<float>& numbers, const StepInfo& /*step*/) override {
    numbers.insert(numbers.end(), flags_.begin(), flags_.end());
  }

  // This rank's flags on the device; needs StepInfo::numbers.
  at::Tensor own(const StepInfo& step) const { return step.numbers.narrow(0, 0, static_cast<int64_t>(flags_.size())); }

  // ---- after it ----

  void check(const Sums& sums, const StepInfo& step) override;
  // The sums over the ranks, by flag.
  at::Tensor sums() const { return sums_.tensor(); }
  // Whether some rank has a new gradient. If this rank has none, only the sums can tell: then the host reads them, once
  // a sync. A CUDA graph repeats what held in the step before it was captured. Errors name the parameter.
  bool on_some_rank(size_t flag, const std::string& parameter);
  // Whether each rank has a gradient of an earlier sync. Call it if no rank has a new one.
  bool is_kept_everywhere(size_t flag) const { return counts_.const_data_ptr<float>()[flag] == 0.0F; }

 private:
  float none_ = 0.0F;
  std::vector<float> flags_;
  Sums sums_;
  at::Tensor counts_;  // the sums on the host, once they are read
  bool is_captured_ = false;
  int64_t num_waits_ = 0;  // in how many syncs in a row the host has waited for the device
};

}  // namespace fastsync
