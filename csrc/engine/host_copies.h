// Gradients of a device on which the process group does not work: on the host while they are summed, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastsync {

class HostCopies {
 public:
  // Takes the values to the host in one copy, into the memory if it fits, which the caller keeps from sync to sync, and
  // waits for that. The gradients are dense.
  HostCopies(const std::vector<at::Tensor>& grads, at::Tensor& memory);

  // A vector for each gradient.
  std::vector<at::Tensor> on_host() const { return memory_.split_with_sizes(lengths_); }

  // Takes them to where they came from, in one copy. The host does not wait.
  void bring_back() const;

 private:
  std::vector<at::Tensor> grads_;
  std::vector<int64_t> lengths_;
  at::Tensor memory_;
};

}  // namespace fastsync
