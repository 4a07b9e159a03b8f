// A signal is a number that each rank adds in each step. By it ranks tell each other of wishes, and of failures.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "engine/passenger.h"
#include "transport/liveness.h"

namespace fastsync {

class Signal final : public Passenger {
 public:
  explicit Signal(Liveness& liveness) : liveness_(liveness) {}

  // Sets the signal of the next step. Before the first call none travels.
  void set(float value) {
    own_ = value;
    sum_.reset();
  }
  // The sum of the newest step's signals; nan if a rank has failed in that step. Unset if there was no step since set.
  std::optional<double> sum() const { return sum_; }

  void add_numbers(std::vector<float>& numbers, const StepInfo& step) override {
    if (own_) {
      numbers.push_back(step.has_failed ? std::numeric_limits<float>::quiet_NaN() : *own_);
    }
  }
  void fail() override { sum_ = std::numeric_limits<double>::quiet_NaN(); }
  // A rank that has failed sends nan, in place of gradients too. If steps may be rolled back, nobody sees those. Waits
  // for the device.
  void check(const Sums& sums, const StepInfo& step) override {
    if (!own_ || step.has_failed) {
      return;
    }
    // Without torch's operations it takes a nanosecond, in place of microseconds.
    sum_ = sums.row.is_cpu() && sums.row.is_contiguous() ? sums.row.const_data_ptr<float>()[sums.begin]
                                                         : sums.row[sums.begin].item<double>();
    if (std::isnan(*sum_)) {
      liveness_.note_failure();
      TORCH_CHECK(false, "fastsync: another rank has failed in step ", step.number);
    }
  }

 private:
  Liveness& liveness_;
  std::optional<float> own_;
  std::optional<double> sum_;
};

}  // namespace fastsync
