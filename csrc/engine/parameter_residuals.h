// What error feedback keeps of each parameter's gradient while the parameter is in no bucket: between a checkpoint, or
// an arrangement of buckets, and the next one.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/parameter_scales.h"
#include "sums/error_feedback.h"

namespace fastsync {

using ParameterResidual = std::pair<at::Tensor, Residual>;

class ParameterResiduals {
 public:
  ParameterResiduals() = default;
  explicit ParameterResiduals(const std::vector<ParameterResidual>& residuals);

  // Those of a bucket that holds these parameters; nothing where it has none.
  void record(const std::vector<ParameterId>& parameters, const std::vector<Residual>& residuals);

  // Gives those of these parameters away, zeros where there is none; nothing where there is none of any.
  std::vector<Residual> take(const std::vector<ParameterId>& parameters, c10::Device device);

  // Of the parameters that still live.
  std::vector<ParameterResidual> list() const;

 private:
  std::unordered_map<const c10::TensorImpl*, std::pair<ParameterId, Residual>> entries_;
};

}  // namespace fastsync
