// The fp16 scale of each parameter's bucket: what a checkpoint holds, and what buckets start from that hold the same
// parameters in another arrangement.
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

class ParameterScales {
 public:
  ParameterScales() = default;
  explicit ParameterScales(const std::vector<ParameterScale>& scales);

  // Takes over the scale of a bucket that holds these parameters; where it has none, they lose theirs. Waits for the
  // device.
  void record(const std::vector<ParameterId>& parameters, const at::Tensor& scale);

  // Where a bucket of these parameters starts, as float32 [1] on the device: with the smallest of their scales, so that
  // none saturates. Undefined where one is unknown; then the gradients decide.
  at::Tensor smallest_of(const std::vector<ParameterId>& parameters, c10::Device device) const;

  // Of the parameters that still live.
  std::vector<ParameterScale> list() const;

  void forget_dead_parameters();

  // Tells whether ranks have the same, for check_agreement.
  const std::string& description() const { return description_; }

 private:
  struct Entry {
    ParameterId parameter;
    double scale;
  };

  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::string description_ = "no saved scales";
};

}  // namespace fastsync
