// The stamps of an engine's step check, as passengers.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "engine/engine_state.h"
#include "engine/passenger.h"

namespace fastsync {

// It must be the last in the list of passengers, for it throws when all others have come.
class Stamps final : public Passenger {
 public:
  Stamps(EngineState& engine, std::shared_ptr<Agreement> agreement)
      : engine_(engine), agreement_(std::move(agreement)) {}

  // Lets the ranks have the same gradients in the first step.
  void expect_same_data() { expects_same_data_ = true; }

  void begin(const StepInfo& step) override { step_check().begin_step(step.number, step.is_active); }
  // Without a new stamp the one before is sent again, so that what is sent does not change.
  void add_numbers(std::vector<float>& numbers, const StepInfo& step) override {
    const bool compares_data = engine_.num_steps() == 1 && !step.is_weighted && !expects_same_data_;
    auto stamp = step_check().stamp(agreement_->number, step.device, compares_data ? step.grads : at::TensorList(),
                                    engine_.weight_check().get());
    is_new_ = stamp.has_value();
    if (is_new_) {
      newest_ = std::move(*stamp);
    }
    numbers.insert(numbers.end(), newest_.begin(), newest_.end());
  }
  void take(const Sums& sums, const StepInfo& /*step*/) override {
    step_check().arrive(is_new_ && sums.numel > 0 ? sums.tensor() : at::Tensor(), engine_.weight_check().get());
  }

 private:
  StepCheck& step_check() const { return agreement_->step_check; }

  EngineState& engine_;
  const std::shared_ptr<Agreement> agreement_;
  bool expects_same_data_ = false;
  bool is_new_ = false;  // whether the newest step has a stamp of its own
  std::vector<float> newest_;
};

}  // namespace fastsync
