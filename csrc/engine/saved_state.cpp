#include "engine/saved_state.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "engine/parameter.h"
#include "transport/agreement.h"

namespace fastsync {

SavedState::SavedState(const std::vector<Row>& rows) {
  std::ostringstream values;
  int64_t num_scales = 0;
  int64_t num_factors = 0;
  for (const auto& [parameter, scale, residual, factor] : rows) {
    const ParameterId id(parameter.getIntrusivePtr());
    entries_.insert_or_assign(id._unsafe_get_target(),
                              Entry{id, scale, residual.value_or(at::Tensor()), factor.value_or(at::Tensor())});
    if (scale) {
      values << *scale << " ";
      num_scales += 1;
    }
    if (factor) {
      const at::Tensor on_host = factor->cpu().contiguous();
      values.write(static_cast<const char*>(on_host.const_data_ptr()), static_cast<std::streamsize>(on_host.nbytes()));
      num_factors += 1;
    }
  }
  description_ = c10::str("saved scales of ", num_scales, " parameters and factors of ", num_factors, ", fingerprint ",
                          fingerprint(values.str()));
}

std::vector<SavedState::Row> SavedState::rows() const {
  std::vector<Row> rows;
  for (const auto& [key, entry] : entries_) {
    if (auto parameter = entry.id.lock()) {
      const auto residual = entry.residual.defined() ? std::optional(entry.residual) : std::nullopt;
      const auto factor = entry.factor.defined() ? std::optional(entry.factor) : std::nullopt;
      rows.emplace_back(at::Tensor(std::move(parameter)), entry.scale, residual, factor);
    }
  }
  return rows;
}

SavedState::Entry& SavedState::entry_of(const ParameterId& id) {
  return entries_.try_emplace(id._unsafe_get_target(), Entry{id}).first->second;
}

void SavedState::record_scale(const std::vector<ParameterId>& parameters, const at::Tensor& scale) {
  const auto value = scale.defined() ? std::optional(scale.item<double>()) : std::nullopt;
  for (const ParameterId& id : parameters) {
    entry_of(id).scale = value;
  }
}

void SavedState::record_residuals(const std::vector<ParameterId>& parameters,
                                  const std::vector<at::Tensor>& residuals) {
  std::erase_if(entries_, [](const auto& entry) { return entry.second.id.expired(); });
  for (size_t i = 0; i < residuals.size(); ++i) {
    if (residuals[i].defined()) {
      entry_of(parameters[i]).residual = residuals[i];
    }
  }
}

void SavedState::record_factors(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& factors) {
  for (size_t i = 0; i < factors.size(); ++i) {
    if (factors[i].defined()) {
      entry_of(parameters[i]).factor = factors[i];
    }
  }
}

at::Tensor SavedState::smallest_scale(const std::vector<ParameterId>& parameters, c10::Device device) const {
  double smallest = std::numeric_limits<double>::infinity();
  for (const ParameterId& id : parameters) {
    const auto entry = entries_.find(id._unsafe_get_target());
    if (entry == entries_.end() || !entry->second.scale) {
      return {};
    }
    smallest = std::min(smallest, *entry->second.scale);
  }
  return at::full({1}, smallest, at::TensorOptions().dtype(at::kFloat).device(device));
}

void SavedState::forget_equal_state() {
  for (auto& [key, entry] : entries_) {
    entry.scale.reset();
    entry.factor.reset();
  }
}

// The parameter may have been cast or resized since. A residual gets the dtype and device that gradients have by now. A
// residual of another size is of no use any more.
std::vector<at::Tensor> SavedState::take_residuals(const std::vector<ParameterId>& parameters, c10::Device device) {
  std::vector<at::Tensor> taken(parameters.size());
  bool has_any = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto entry = entries_.find(parameters[i]._unsafe_get_target());
    const at::Tensor residual = entry != entries_.end() ? std::exchange(entry->second.residual, {}) : at::Tensor();
    const at::Tensor parameter(parameters[i].lock());
    if (residual.defined() && residual.numel() == (parameter.is_complex() ? 2 : 1) * parameter.numel()) {
      const bool is_wide = c10::toRealValueType(grad_dtype_of(parameter)) == at::kDouble;
      taken[i] = residual.to(device, is_wide ? at::kDouble : at::kFloat);
      has_any = true;
    }
  }
  return has_any ? taken : std::vector<at::Tensor>();
}

std::vector<at::Tensor> SavedState::take_factors(const std::vector<ParameterId>& parameters, c10::Device device) {
  std::vector<at::Tensor> taken;
  for (const ParameterId& id : parameters) {
    const auto entry = entries_.find(id._unsafe_get_target());
    const at::Tensor factor = entry != entries_.end() ? std::exchange(entry->second.factor, {}) : at::Tensor();
    taken.push_back(factor.defined() ? factor.to(device) : factor);
  }
  return taken;
}

}  // namespace fastsync
