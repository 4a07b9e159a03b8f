#include "engine/used_parameters.h"

#include <ATen/ATen.h>

namespace fastsync {

void UsedParameters::add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) {
  if (is_on_) {
    const at::Tensor is_new = flags_.own(step).eq(1.0F).to(at::kFloat);
    tensors.push_back(step.weight.defined() ? is_new.mul_(step.weight) : is_new);
  }
}

at::Tensor UsedParameters::factors(const StepInfo& step) const {
  constexpr double kLeastWeight = 1e-30;  // in units of the mean weight
  if (!is_on_) {
    return {};
  }
  const auto num_ranks = static_cast<double>(step.num_ranks);
  const at::Tensor users = sums_.tensor().to(at::kDouble);
  const at::Tensor num_active =
      step.active.defined() ? step.active.sum().to(users.device()) : at::full({}, num_ranks, users.options());
  const at::Tensor is_mean_of_all = flags_.sums().gt(num_active - 0.5).logical_or_(users < kLeastWeight);
  return at::where(is_mean_of_all, 1.0, num_ranks / users);
}

}  // namespace fastsync
