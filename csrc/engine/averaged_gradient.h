// The gradient that a sync has left, and whether a parameter still has it as it was left.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "engine/saved_state.h"

namespace fastsync {

class AveragedGradient {
 public:
  AveragedGradient() = default;
  // Undefined where the parameter has none.
  explicit AveragedGradient(const at::Tensor& gradient);

  // False also where that cannot be proven. Writes to .data, of NumPy, and of kernels with bare pointers count nowhere.
  // But all of them begin with Python's view of the gradient, which lives as long as the gradient once it was made.
  bool is_still(const at::Tensor& gradient) const;
  // Autograd has written it since, for Python has not: no rank has averaged it. False also where Python may have.
  bool was_written_by_autograd(const at::Tensor& gradient) const;

 private:
  bool is_as_it_was(const at::Tensor& gradient) const;

  std::optional<ParameterId> gradient_;  // weak, so that no other can take its address
  uint32_t version_ = 0;
};

}  // namespace fastsync
