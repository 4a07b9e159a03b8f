// Which ranks have used which parameters, as op="mean_of_used" asks.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "engine/gradient_flags.h"

namespace fastsync {

// Note [Means of used parameters]
//   With op="mean_of_used" a mean is over the ranks that have a new gradient of the parameter. Nobody knows these ranks
//   before the last bucket is sent, when the means of others have been unpacked. So the ranks add up the mean over all
//   ranks, and multiply it afterwards, in one pass over a bucket. They leave it as it is if all ranks have a gradient.
//   Then it has the bits that op="mean" gives. A residual is part of that first mean, also a rank's that has no
//   gradient now: it may come of encoding sums.

// Each rank adds its weight for each parameter that it has a new gradient of. The mean over all ranks has the weight of
// the number of ranks.
class UsedParameters final : public Passenger {
 public:
  // The flags must come before it in the list of passengers.
  UsedParameters(const GradientFlags& flags, bool is_on) : flags_(flags), is_on_(is_on) {}

  void add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) override;
  void check(const Sums& sums, const StepInfo& /*step*/) override { sums_ = sums; }

  // The factors of the means, by flag: float64. Undefined if it is off. They are 1 for parameters without users, and
  // for users that count for nothing: their part of the mean would be lost in float32.
  at::Tensor factors(const StepInfo& step) const;

 private:
  const GradientFlags& flags_;
  const bool is_on_;
  Sums sums_;
};

}  // namespace fastsync
