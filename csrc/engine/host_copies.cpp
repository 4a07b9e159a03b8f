#include "engine/host_copies.h"

#include <ATen/ATen.h>

#include "passes/backend.h"

namespace fastsync {

HostCopies::HostCopies(const std::vector<at::Tensor>& grads, at::Tensor& memory) {
  const c10::Device device = grads.front().device();
  TORCH_CHECK(!is_capturing(device), "fastsync: gradients on ", device, " are summed on the host, because the process ",
              "group does not work on that device, and a graph cannot capture that");
  for (const at::Tensor& grad : grads) {
    grads_.push_back(grad.as_strided({grad.numel()}, {1}));
    lengths_.push_back(grad.numel());
  }
  const at::Tensor flat = grads_.size() == 1 ? grads_.front() : at::cat(grads_);
  if (!memory.defined() || memory.numel() != flat.numel() || memory.scalar_type() != flat.scalar_type()) {
    memory = at::empty({flat.numel()}, flat.options().device(c10::kCPU).pinned_memory(true));
  }
  memory_ = memory;
  memory_.copy_(flat);
}

void HostCopies::bring_back() const {
  const at::Tensor flat = memory_.to(grads_.front().device(), /*non_blocking=*/true);
  at::_foreach_copy_(grads_, flat.split_with_sizes(lengths_));
}

}  // namespace fastsync
