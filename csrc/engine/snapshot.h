// Which tensor a gradient was, and what it held: to tell later whether it is still the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "engine/saved_state.h"

namespace fastsync {

// Note [Unchanged gradients]
// Writes to .data, of NumPy, and of kernels with bare pointers change no version counter. But all of them begin with
// Python's view of the gradient, which lives as long as the gradient once it was made. So a gradient that Python has
// not seen, and whose version is the same, is proven to be unchanged.
class Snapshot {
 public:
  Snapshot() = default;
  // Undefined where the parameter has none.
  explicit Snapshot(const at::Tensor& gradient);

  bool is_of(const at::Tensor& gradient) const;
  // Nothing has changed it since, as far as PyTorch counts.
  bool holds(const at::Tensor& gradient) const { return is_of(gradient) && version_ == gradient._version(); }
  // Nothing has changed it since, by any means; an undefined one is still undefined. False also where that cannot be
  // proven.
  bool is_still(const at::Tensor& gradient) const;
  // Autograd has written it since, for Python has not. False also where Python may have.
  bool was_written_by_autograd(const at::Tensor& gradient) const;

 private:
  std::optional<ParameterId> gradient_;  // weak, so that no other can take its address
  uint32_t version_ = 0;
};

}  // namespace fastsync
