#include "sums/all_reduce_sum.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace fastsync {

namespace {

// Returns memory for the wire. On a CPU it is `kept` if that fits, because new memory costs page faults. On other
// devices it is always new, so that idle buckets hold no memory. There the allocator takes cached memory for it.
// Packing fills the gaps between gradients.
at::Tensor wire_memory(at::Tensor& kept, int64_t bytes, c10d::ProcessGroup& group, c10::Device device) {
  if (!device.is_cpu()) {
    kept.reset();
    return new_buffer(group, bytes, device);
  }
  if (!kept.defined() || kept.numel() != bytes) {
    kept = at::zeros({bytes}, at::kByte);
  }
  return kept;
}

// Whether a factor 1/n means the same in the dtype of the gradients as in the passes, which multiply in float32.
bool has_exact_share(DType dtype, int64_t num_ranks) {
  const bool is_power_of_two = (num_ranks & (num_ranks - 1)) == 0;
  return is_power_of_two || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

}  // namespace

AllReduceSum::AllReduceSum(FlatGradients gradients, c10::intrusive_ptr<c10d::ProcessGroup> group, at::Tensor& kept,
                           bool is_lossless, bool in_place)
    : SumWork(std::move(gradients)),
      group_(std::move(group)),
      is_lossless_(is_lossless),
      is_in_place_(in_place && gradients_.grads.size() == 1 && gradients_.grad_dtype == gradients_.wire_dtype),
      num_bytes_(bytes_of(gradients_.num_values, gradients_.wire_dtype)) {
  gradients_.multiplier = 1.0 / static_cast<double>(group_->getSize());
  gradients_.limit = saturation_limit(is_lossless ? DType::kFloat64 : gradients_.wire_dtype, group_->getSize());
  carries_side_values_ = gradients_.side_bytes() > 0 && gradients_.wire_dtype == DType::kFloat32 && !is_in_place_;
  const int64_t bytes = num_bytes_ + (carries_side_values_ ? gradients_.side_bytes() : 0);
  memory_ = is_in_place_ ? gradients_.grads.front().view({-1}) : wire_memory(kept, bytes, *group_, gradients_.device);
}

// Whether the gradients are their own wire, and the group multiplies them as packing would. It has no count of
// saturated values to write then, which stays 0.
bool AllReduceSum::needs_no_packing() const {
  return is_lossless_ && is_in_place_ && !gradients_.weight.defined() && !gradients_.residual.defined() &&
         !gradients_.device.is_cpu() &&
         (has_one_rank() || (averages_by_factors(*group_, gradients_.device) &&
                             has_exact_share(gradients_.grad_dtype, group_->getSize())));
}

void AllReduceSum::send() {
  const bool group_multiplies = needs_no_packing();
  if (!group_multiplies) {
    gradients_.pack_all(memory_.data_ptr());
  }
  std::vector<Reduced> all{{memory_.view(scalar_type_of(gradients_.wire_dtype)),
                            group_multiplies ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM}};
  if (carries_side_values_) {
    put_values(gradients_.side_values, memory_, num_bytes_, /*stride=*/0, /*count=*/1);
  } else if (gradients_.side_values.defined()) {
    all.push_back({gradients_.side_values = gradients_.side_values.clone()});
  }
  transfer_ = all_reduce(*group_, gradients_.device, all);
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
