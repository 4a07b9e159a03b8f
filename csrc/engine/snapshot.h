// A snapshot notes which tensor a gradient was, and its version, to tell later whether the gradient is unchanged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "engine/saved_state.h"

namespace fastsync {

// Note [Unchanged gradients]
// Writes to .data, by NumPy, and by kernels with bare pointers change no version counter. But each of them needs the
// Python object of the gradient, which lives as long as the gradient once it was made. So if a gradient's version is
// the same, and Python has not seen the gradient, it is proven to be unchanged.
class Snapshot {
 public:
  Snapshot() = default;
  // The gradient may be undefined.
  explicit Snapshot(const at::Tensor& gradient);

  // Whether the gradient is that tensor.
  bool is_of(const at::Tensor& gradient) const;
  // Whether the gradient is that tensor, and nothing has changed it since, as far as PyTorch counts.
  bool holds(const at::Tensor& gradient) const { return is_of(gradient) && version_ == gradient._version(); }
  // How often the gradient was written to since, as far as PyTorch counts; -1 if it is another tensor now, or none. An
  // undefined gradient that is still undefined was not written to.
  int64_t num_writes(const at::Tensor& gradient) const {
    const bool is_same = gradient_ ? is_of(gradient) : !gradient.defined();
    return !is_same ? -1 : gradient.defined() ? static_cast<int64_t>(gradient._version()) - version_ : 0;
  }
  // Whether it is proven that nothing has changed the gradient since, by any means. For an undefined gradient: whether
  // it is still undefined.
  bool is_still(const at::Tensor& gradient) const;
  // Whether it is proven that autograd has written the gradient since: it has changed, and Python has not seen it.
  bool was_written_by_autograd(const at::Tensor& gradient) const;

 private:
  std::optional<ParameterId> gradient_;  // a weak reference, so that no other tensor can take the address
  uint32_t version_ = 0;
};

}  // namespace fastsync
