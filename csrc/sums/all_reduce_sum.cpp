#include "sums/all_reduce_sum.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace fastsync {

AllReduceSum::AllReduceSum(FlatGradients gradients, c10::intrusive_ptr<c10d::ProcessGroup> group, at::Tensor& kept,
                           bool in_place)
    : SumWork(std::move(gradients)),
      group_(std::move(group)),
      num_bytes_(bytes_of(gradients_.num_values, gradients_.wire_dtype)) {
  const bool is_in_place = in_place && gradients_.grads.size() == 1 && gradients_.grad_dtype == gradients_.wire_dtype;
  carries_side_values_ = gradients_.side_bytes() > 0 && gradients_.wire_dtype == DType::kFloat32 && !is_in_place;
  const int64_t bytes = num_bytes_ + (carries_side_values_ ? gradients_.side_bytes() : 0);
  memory_ = is_in_place ? gradients_.grads.front().view({-1}) : send_buffer(kept, bytes, at::kByte, gradients_.device);
}

void AllReduceSum::send() {
  gradients_.pack(all_values(), gradients_.wire_dtype, memory_.data_ptr(), Position());
  std::vector<at::Tensor> buffers{memory_.view(scalar_type_of(gradients_.wire_dtype))};
  if (carries_side_values_) {
    put_values(gradients_.side_values, memory_, num_bytes_, /*stride=*/0, /*count=*/1);
  } else if (gradients_.side_values.defined()) {
    buffers.push_back(gradients_.side_values = gradients_.side_values.clone());
  }
  transfer_ = all_reduce(*group_, gradients_.device, buffers);
}

void AllReduceSum::finish(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] { let_go_of_gradients(); });
  transfer_->wait_for_rows();
  if (carries_side_values_) {
    gradients_.side_values = memory_.narrow(0, num_bytes_, gradients_.side_bytes()).view(at::kFloat);
  }
  on_reduced();
  gradients_.unpack(all_values(), memory_.data_ptr(), /*num_wires=*/1, /*stride=*/0, gradients_.mean_factor,
                    Position());
  use_memory_on_current_stream();
}

}  // namespace fastsync
