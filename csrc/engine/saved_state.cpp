#include "engine/saved_state.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

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

void SavedResiduals::record(const std::vector<ParameterId>& parameters, const std::vector<Residual>& residuals) {
  forget_dead_parameters();
  for (size_t i = 0; i < residuals.size(); ++i) {
    if (residuals[i].own.defined()) {
      save(parameters[i], residuals[i]);
    }
  }
}

// What was saved may be the caller's.
void SavedResiduals::rescale(const at::Tensor& factor) {
  const auto rescaled = [&](const at::Tensor& values) {
    return values.defined() ? values.mul(factor.to(values.device(), /*non_blocking=*/true)) : values;
  };
  for (const auto& [parameter, residual] : list()) {
    save(ParameterId(parameter.getIntrusivePtr()), {rescaled(residual.own), rescaled(residual.of_sums)});
  }
}

std::vector<Residual> SavedResiduals::take(const std::vector<ParameterId>& parameters, c10::Device device) {
  if (std::none_of(parameters.begin(), parameters.end(), [&](const ParameterId& id) { return find(id) != nullptr; })) {
    return {};
  }
  std::vector<Residual> taken;
  for (const ParameterId& id : parameters) {
    const Residual* residual = find(id);
    taken.push_back(fitted(residual != nullptr ? *residual : Residual{}, at::Tensor(id.lock()), device));
    forget(id);
  }
  return taken;
}

}  // namespace fastsync
