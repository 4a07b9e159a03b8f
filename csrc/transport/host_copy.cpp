#include "transport/host_copy.h"

#include <ATen/ops/empty.h>

#include "transport/streams.h"

namespace fastsync {

HostCopy::HostCopy(const at::Tensor& tensor)
    : memory_(at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true))),
      has_come_(tensor.device().type()) {
  memory_.copy_(tensor, /*non_blocking=*/true);
  has_come_.record(current_stream(tensor.device()));
}

const at::Tensor& HostCopy::wait() {
  if (!has_come_.query()) {
    has_come_.synchronize();
  }
  return memory_;
}

}  // namespace fastsync
