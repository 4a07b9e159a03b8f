#include "parameter_residuals.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace fastsync {

ParameterResiduals::ParameterResiduals(const std::vector<ParameterResidual>& residuals) {
  for (const auto& [parameter, residual] : residuals) {
    entries_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                              std::pair(ParameterId(parameter.getIntrusivePtr()), residual));
  }
}

void ParameterResiduals::record(const std::vector<ParameterId>& parameters, const std::vector<Residual>& residuals) {
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
    if (entry != entries_.end()) {
      const auto [own, of_sums] = entry->second.second;
      taken.push_back({own.to(device), of_sums.defined() ? of_sums.to(device) : at::Tensor()});
      entries_.erase(entry);
      continue;
    }
    const at::Tensor parameter(id.lock());
    const auto dtype = parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    taken.push_back({at::zeros({parameter.numel()}, at::TensorOptions().dtype(dtype).device(device)), {}});
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
