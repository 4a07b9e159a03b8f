#include "sums/all_reduce_sum.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace fastsync {

namespace {

// Returns memory for the wire. On a CPU it is `kept` if that fits, because new memory costs page faults. On other
// devices it is new each time, and goes back to the allocator once it is read. Packing fills the gaps between
// gradients.
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

}  // namespace

AllReduceSum::AllReduceSum(FlatGradients gradients, std::shared_ptr<const Team> team, at::Tensor& kept,
                           bool is_lossless, bool in_place)
    : SumWork(std::move(gradients)),
      team_(std::move(team)),
      is_lossless_(is_lossless),
      is_in_place_(in_place && gradients_.grads.size() == 1 && gradients_.grad_dtype == gradients_.wire_dtype),
      is_idle_(needs_nothing()),
      num_bytes_(bytes_of(gradients_.num_values, gradients_.wire_dtype)) {
  gradients_.multiplier = 1.0 / static_cast<double>(team_->size());
  gradients_.limit = saturation_limit(is_lossless ? DType::kFloat64 : gradients_.wire_dtype, team_->size());
  carries_side_values_ =
      gradients_.side_bytes() > 0 && gradients_.wire_dtype == DType::kFloat32 && !is_in_place_ && !is_idle_;
  if (is_idle_) {
    return;
  }
  const int64_t bytes = num_bytes_ + (carries_side_values_ ? gradients_.side_bytes() : 0);
  memory_ =
      is_in_place_ ? gradients_.grads.front().view({-1}) : wire_memory(kept, bytes, *team_->group(), gradients_.device);
}

// Whether the gradients are their own wire, and the group multiplies them as packing would, or there is one rank. The
// count of saturated values stays 0 then. Only two ranks let the group multiply. With more of them NCCL cannot add in
// the switch what it averages, and adds in another order than what DDP has multiplied before.
bool AllReduceSum::needs_no_packing() const {
  return is_lossless_ && is_in_place_ && !gradients_.weight.defined() && !gradients_.residual.defined() &&
         (team_->size() == 1 || (team_->size() == 2 && team_->averages_by_factors()));
}

// Whether unpacking would only take the statistics, which nobody needs.
bool AllReduceSum::needs_no_unpacking() const {
  return is_in_place_ && gradients_.mean_factor == 1.0 && !gradients_.scale.defined() && !gradients_.needs_stats;
}

// Whether this rank is alone, and nobody needs the statistics.
bool AllReduceSum::needs_nothing() const {
  return is_lossless_ && !is_in_place_ && team_->size() == 1 && gradients_.mean_factor == 1.0 &&
         !gradients_.weight.defined() && !gradients_.residual.defined() && !gradients_.needs_stats;
}

void AllReduceSum::send() {
  if (is_idle_) {
    gradients_.side_values = gradients_.side_values.defined() ? gradients_.side_values.clone() : at::Tensor();
    transfer_ = std::make_unique<Transfer>();
    return;
  }
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
  transfer_ = all_reduce(*team_->group(), gradients_.device, all);
}

void AllReduceSum::receive(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] {
    let_go_of_gradients();
    memory_.reset();
  });
  transfer_->wait_for_rows();
  if (carries_side_values_) {
    gradients_.side_values = memory_.narrow(0, num_bytes_, gradients_.side_bytes()).view(at::kFloat);
  }
  on_reduced();
  leaves_stats_out_ = is_idle_ || needs_no_unpacking();
  if (!leaves_stats_out_) {
    gradients_.unpack(gradients_.all_values(), memory_.data_ptr(), /*num_wires=*/1, /*stride=*/0,
                      gradients_.mean_factor, Position());
  }
  use_memory_on_current_stream();
}

}  // namespace fastsync
