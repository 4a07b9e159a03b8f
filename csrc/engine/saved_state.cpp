#include "engine/saved_state.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "transport/agreement.h"

namespace fastsync {

SavedScales::SavedScales(const std::vector<ParameterScale>& scales) : SavedState(scales) {
  std::ostringstream values;
  for (const auto& [parameter, scale] : scales) {
    values << scale << " ";
  }
  description_ = c10::str("saved scales of ", scales.size(), " parameters, fingerprint ", fingerprint(values.str()));
}

void SavedScales::record(const std::vector<ParameterId>& parameters, const at::Tensor& scale) {
  const double value = scale.defined() ? scale.item<double>() : 0.0;
  for (const ParameterId& id : parameters) {
    if (scale.defined()) {
      save(id, value);
    } else {
      forget(id);
    }
  }
}

at::Tensor SavedScales::smallest_of(const std::vector<ParameterId>& parameters, c10::Device device) const {
  double smallest = std::numeric_limits<double>::infinity();
  for (const ParameterId& id : parameters) {
    const double* scale = find(id);
    if (scale == nullptr) {
      return {};
    }
    smallest = std::min(smallest, *scale);
  }
  return at::full({1}, smallest, at::TensorOptions().dtype(at::kFloat).device(device));
}

void SavedResiduals::record(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& residuals) {
  forget_dead_parameters();
  for (size_t i = 0; i < residuals.size(); ++i) {
    if (residuals[i].defined()) {
      save(parameters[i], residuals[i]);
    }
  }
}

// What was saved may be the caller's.
void SavedResiduals::rescale(const at::Tensor& factor) {
  for (const auto& [parameter, residual] : list()) {
    save(ParameterId(parameter.getIntrusivePtr()), residual.mul(factor.to(residual.device(), /*non_blocking=*/true)));
  }
}

// For the values and the dtype that the parameter's gradients have by now, which is not those of a residual from before
// a cast: what is of another size is of no use any more.
std::vector<at::Tensor> SavedResiduals::take(const std::vector<ParameterId>& parameters, c10::Device device) {
  std::vector<at::Tensor> taken;
  bool has_any = false;
  for (const ParameterId& id : parameters) {
    const at::Tensor parameter(id.lock());
    const auto dtype = c10::toRealValueType(parameter.scalar_type()) == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor* residual = find(id);
    const bool fits = residual != nullptr && residual->numel() == (parameter.is_complex() ? 2 : 1) * parameter.numel();
    taken.push_back(fits ? residual->to(device, dtype) : at::Tensor());
    has_any |= fits;
    forget(id);
  }
  return has_any ? taken : std::vector<at::Tensor>();
}

}  // namespace fastsync
