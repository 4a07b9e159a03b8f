// What is saved of each parameter between a checkpoint, or an arrangement of buckets, and the next one: the fp16 scale
// of its bucket, and what error feedback keeps of its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fastsync {

// Weak, so that no model is kept alive, and no other can take its address while it is remembered here.
using ParameterId = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using ParameterScale = std::pair<at::Tensor, double>;
using ParameterResidual = std::pair<at::Tensor, at::Tensor>;

template <class Value>
class SavedState {
 public:
  SavedState() = default;
  explicit SavedState(const std::vector<std::pair<at::Tensor, Value>>& values) {
    for (const auto& [parameter, value] : values) {
      save(ParameterId(parameter.getIntrusivePtr()), value);
    }
  }

  // Of the parameters that still live.
  std::vector<std::pair<at::Tensor, Value>> list() const {
    std::vector<std::pair<at::Tensor, Value>> values;
    for (const auto& [key, entry] : entries_) {
      if (auto parameter = entry.first.lock()) {
        values.emplace_back(at::Tensor(std::move(parameter)), entry.second);
      }
    }
    return values;
  }

  void forget_dead_parameters() {
    std::erase_if(entries_, [](const auto& entry) { return entry.second.first.expired(); });
  }

 protected:
  void save(const ParameterId& id, const Value& value) {
    entries_.insert_or_assign(id._unsafe_get_target(), std::pair(id, value));
  }
  void forget(const ParameterId& id) { entries_.erase(id._unsafe_get_target()); }
  const Value* find(const ParameterId& id) const {
    const auto entry = entries_.find(id._unsafe_get_target());
    return entry == entries_.end() ? nullptr : &entry->second.second;
  }

 private:
  std::unordered_map<const c10::TensorImpl*, std::pair<ParameterId, Value>> entries_;
};

class SavedScales : public SavedState<double> {
 public:
  SavedScales() = default;
  explicit SavedScales(const std::vector<ParameterScale>& scales);

  // Takes over the scale of a bucket that holds these parameters; where it has none, they lose theirs. Waits for the
  // device.
  void record(const std::vector<ParameterId>& parameters, const at::Tensor& scale);

  // Where a bucket of these parameters starts, as float32 [1] on the device: with the smallest of their scales, so that
  // none saturates. Undefined where one is unknown; then the gradients decide.
  at::Tensor smallest_of(const std::vector<ParameterId>& parameters, c10::Device device) const;

  // Tells whether ranks were given the same, for check_agreement.
  const std::string& description() const { return description_; }

 private:
  std::string description_ = "no saved scales";
};

class SavedResiduals : public SavedState<at::Tensor> {
 public:
  using SavedState::SavedState;

  void rescale(const at::Tensor& factor);

  // Those of a bucket that holds these parameters; nothing where it has none.
  void record(const std::vector<ParameterId>& parameters, const std::vector<at::Tensor>& residuals);

  // Gives those of these parameters away, undefined where there is none; nothing where there is none of any.
  std::vector<at::Tensor> take(const std::vector<ParameterId>& parameters, c10::Device device);
};

}  // namespace fastsync
