// Gradients of a device on which the process group does not work: on the host while they are summed, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastsync {

class HostCopies {
 public:
  // Takes the values to the host in one copy, into the memory if it fits, which the caller keeps from sync to sync, and
  // waits for that. The gradients are dense.
  HostCopies(const std::vector<at::Tensor>& grads, at::Tensor& memory);

  // A vector for each gradient, and the same on its device.
  std::vector<at::Tensor> on_host() const;
  const std::vector<at::Tensor>& grads() const { return grads_; }

  // Takes them to where they came from, in one copy. The host does not wait.
  void bring_back() const;

 private:
  std::vector<at::Tensor> grads_;
  at::Tensor memory_;
};

}  // namespace fastsync
