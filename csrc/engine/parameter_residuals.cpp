#include "engine/parameter_residuals.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace fastsync {

namespace {

// For the values and the dtype that the parameter's gradients have by now, which is not those of a residual from before
// a cast: what is of another size is of no use any more.
Residual fitted(const Residual& residual, const at::Tensor& parameter, c10::Device device) {
  const auto dtype = c10::toRealValueType(parameter.scalar_type()) == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t numel = parameter.is_complex() ? 2 * parameter.numel() : parameter.numel();
  const auto fit = [&](const at::Tensor& values) {
    return values.defined() && values.numel() == numel ? values.to(device, dtype) : at::Tensor();
  };
  at::Tensor own = fit(residual.own);
  return {own.defined() ? own : at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device)),
          fit(residual.of_sums)};
}

}  // namespace

ParameterResiduals::ParameterResiduals(const std::vector<ParameterResidual>& residuals) {
  for (const auto& [parameter, residual] : residuals) {
    entries_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                              std::pair(ParameterId(parameter.getIntrusivePtr()), residual));
  }
}

void ParameterResiduals::record(const std::vector<ParameterId>& parameters, const std::vector<Residual>& residuals) {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.first.expired(); });
  for (size_t i = 0; i < residuals.size(); ++i) {
    entries_.insert_or_assign(parameters[i]._unsafe_get_target(), std::pair(parameters[i], residuals[i]));
  }
}

std::vector<Residual> ParameterResiduals::take(const std::vector<ParameterId>& parameters, c10::Device device) {
  const auto is_known = [&](const ParameterId& id) { return entries_.count(id._unsafe_get_target()) != 0; };
  std::vector<Residual> taken;
  if (std::none_of(parameters.begin(), parameters.end(), is_known)) {
    return taken;
  }
  for (const ParameterId& id : parameters) {
    const auto entry = entries_.find(id._unsafe_get_target());
    taken.push_back(fitted(entry != entries_.end() ? entry->second.second : Residual{}, at::Tensor(id.lock()), device));
    if (entry != entries_.end()) {
      entries_.erase(entry);
    }
  }
  return taken;
}

std::vector<ParameterResidual> ParameterResiduals::list() const {
  std::vector<ParameterResidual> residuals;
  for (const auto& [key, entry] : entries_) {
    if (auto parameter = entry.first.lock()) {
      residuals.emplace_back(at::Tensor(std::move(parameter)), entry.second);
    }
  }
  return residuals;
}

}  // namespace fastsync
