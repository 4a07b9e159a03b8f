// A copy of a device's tensor that is on its way to the host, for numbers that the host reads later.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace fastsync {

class HostCopy {
 public:
  // Begins the copy on the current stream of the tensor's device. The host does not wait.
  explicit HostCopy(const at::Tensor& tensor);

  // Returns the copy. The host waits only if it has not come yet.
  const at::Tensor& wait();

 private:
  at::Tensor memory_;  // pinned
  c10::Event has_come_;
};

}  // namespace fastsync
