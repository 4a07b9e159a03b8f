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
  // The gradient may be undefined.
  explicit Snapshot(const at::Tensor& gradient);

  // Whether the gradient is that tensor.
  bool is_of(const at::Tensor& gradient) const;
  // Whether the gradient is that tensor, and nothing has changed it since, as far as PyTorch counts.
  bool holds(const at::Tensor& gradient) const { return is_of(gradient) && version_ == gradient._version(); }
  // Whether it is proven that nothing has changed the gradient since, by any means. An undefined one is still
  // undefined.
  bool is_still(const at::Tensor& gradient) const;
  // Whether it is proven that autograd has written the gradient since, because Python has not.
  bool was_written_by_autograd(const at::Tensor& gradient) const;

 private:
  std::optional<ParameterId> gradient_;  // weak, so that no other can take its address
  uint32_t version_ = 0;
};

}  // namespace fastsync
