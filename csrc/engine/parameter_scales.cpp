#include "engine/parameter_scales.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "transport/agreement.h"

namespace fastsync {

ParameterScales::ParameterScales(const std::vector<ParameterScale>& scales) {
  std::ostringstream values;
  for (const auto& [parameter, scale] : scales) {
    entries_.insert_or_assign(parameter.unsafeGetTensorImpl(), Entry{ParameterId(parameter.getIntrusivePtr()), scale});
    values << scale << " ";
  }
  description_ = "saved scales of " + std::to_string(scales.size()) + " parameters, fingerprint " +
                 std::to_string(fingerprint(values.str()));
}

void ParameterScales::record(const std::vector<ParameterId>& parameters, const at::Tensor& scale) {
  if (!scale.defined()) {
    for (const ParameterId& id : parameters) {
      entries_.erase(id._unsafe_get_target());
    }
    return;
  }
  const auto value = scale.item<double>();
  for (const ParameterId& id : parameters) {
    entries_.insert_or_assign(id._unsafe_get_target(), Entry{id, value});
  }
}

at::Tensor ParameterScales::smallest_of(const std::vector<ParameterId>& parameters, c10::Device device) const {
  double smallest = std::numeric_limits<double>::infinity();
  for (const ParameterId& id : parameters) {
    const auto entry = entries_.find(id._unsafe_get_target());
    if (entry == entries_.end()) {
      return {};
    }
    smallest = std::min(smallest, entry->second.scale);
  }
  return at::full({1}, smallest, at::TensorOptions().dtype(at::kFloat).device(device));
}

std::vector<ParameterScale> ParameterScales::list() const {
  std::vector<ParameterScale> scales;
  for (const auto& [key, entry] : entries_) {
    if (auto parameter = entry.parameter.lock()) {
      scales.emplace_back(at::Tensor(std::move(parameter)), entry.scale);
    }
  }
  return scales;
}

void ParameterScales::forget_dead_parameters() {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.parameter.expired(); });
}

}  // namespace fastsync
