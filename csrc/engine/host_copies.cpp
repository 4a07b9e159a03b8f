#include "engine/host_copies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>

#include "passes/backend.h"

namespace fastsync {

namespace {

std::vector<at::Tensor> split(const at::Tensor& values, const std::vector<at::Tensor>& alike) {
  std::vector<int64_t> lengths;
  std::transform(alike.begin(), alike.end(), std::back_inserter(lengths),
                 [](const at::Tensor& each) { return each.numel(); });
  return values.split_with_sizes(lengths);
}

}  // namespace

HostCopies::HostCopies(const std::vector<at::Tensor>& grads, at::Tensor& memory) {
  const c10::Device device = grads.front().device();
  TORCH_CHECK(!is_capturing(device), "fastsync: gradients on ", device, " are summed on the host, because the process ",
              "group does not work on that device, and a graph cannot capture that");
  std::transform(grads.begin(), grads.end(), std::back_inserter(grads_),
                 [](const at::Tensor& grad) { return grad.as_strided({grad.numel()}, {1}); });
  const at::Tensor flat = grads_.size() == 1 ? grads_.front() : at::cat(grads_);
  if (!memory.defined() || memory.numel() != flat.numel() || memory.scalar_type() != flat.scalar_type()) {
    memory = at::empty({flat.numel()}, flat.options().device(c10::kCPU).pinned_memory(true));
  }
  memory_ = memory;
  memory_.copy_(flat);
}

std::vector<at::Tensor> HostCopies::on_host() const { return split(memory_, grads_); }

void HostCopies::bring_back() const {
  const at::Tensor flat = memory_.to(grads_.front().device(), /*non_blocking=*/true);
  at::_foreach_copy_(grads_, split(flat, grads_));
}

}  // namespace fastsync
