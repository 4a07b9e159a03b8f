#include "sums/stats_in_order.h"

#include <ATen/ATen.h>

#include "passes/backend.h"
#include "passes/workspace.h"

namespace fastsync {

// Unpacking a gradient from its own memory leaves it as it is, and takes the statistics.
at::Tensor stats_in_order(const std::vector<at::Tensor>& gradients) {
  const at::NoGradGuard no_grad;
  const c10::Device device = gradients.front().device();
  const at::Tensor stats = at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device));
  Workspace workspace(device);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const at::Tensor values = gradients[i].contiguous();
    const DType dtype = dtype_of(values.scalar_type());
    const Segment segment{values.data_ptr(), values.numel(), /*offset=*/0};
    run_unpack({.segments = &segment,
                .num_segments = 1,
                .grad_dtype = dtype,
                .wire_dtype = dtype,
                .wire = values.data_ptr(),
                .bucket_scale = nullptr,
                .stats = stats.data_ptr<double>(),
                .position = {.is_first = i == 0, .is_last = i + 1 == gradients.size()}},
               device, workspace);
  }
  return stats;
}

}  // namespace fastsync
