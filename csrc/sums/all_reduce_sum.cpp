#include "sums/all_reduce_sum.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace fastsync {

AllReduceSum::AllReduceSum(Bucket bucket, c10::intrusive_ptr<c10d::ProcessGroup> group, at::Tensor& kept, bool in_place)
    : BucketSum(std::move(bucket)),
      group_(std::move(group)),
      num_bytes_(bytes_of(bucket_.num_values, bucket_.wire_dtype)) {
  const bool is_in_place = in_place && bucket_.grads.size() == 1 && bucket_.grad_dtype == bucket_.wire_dtype;
  has_room_ = bucket_.side_bytes() > 0 && bucket_.wire_dtype == DType::kFloat32 && !is_in_place;
  const int64_t bytes = num_bytes_ + (has_room_ ? bucket_.side_bytes() : 0);
  memory_ = is_in_place ? bucket_.grads.front().view({-1}) : send_buffer(kept, bytes, at::kByte, bucket_.device);
}

void AllReduceSum::send() {
  bucket_.pack(all_values(), bucket_.wire_dtype, memory_.data_ptr(), Position());
  std::vector<at::Tensor> buffers{memory_.view(scalar_type_of(bucket_.wire_dtype))};
  if (has_room_) {
    put_values(bucket_.side_values, memory_, num_bytes_, /*stride=*/0, /*count=*/1);
  } else if (bucket_.side_values.defined()) {
    buffers.push_back(bucket_.side_values = bucket_.side_values.clone());
  }
  transfer_ = all_reduce(*group_, bucket_.device, buffers);
}

void AllReduceSum::finish(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] { let_go_of_gradients(); });
  transfer_->wait_for_rows();
  if (has_room_) {
    bucket_.side_values = memory_.narrow(0, num_bytes_, bucket_.side_bytes()).view(at::kFloat);
  }
  on_reduced();
  bucket_.unpack(all_values(), memory_.data_ptr(), /*num_wires=*/1, /*stride=*/0, bucket_.mean_factor, Position());
  use_memory_on_current_stream();
}

}  // namespace fastsync
