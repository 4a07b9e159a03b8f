#include "sums/sparse_sum.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "passes/aten/passes.h"
#include "transport/streams.h"

namespace fastsync {

namespace {

// The numbers of a header. Side values follow.
enum HeaderNumber : int { kNumRows, kRowScale, kNumHeaderNumbers };

constexpr int64_t kMessageAlignment = 16;  // in bytes, see Rows::of

// Makes a transfer of each rank's row of a buffer to all ranks.
std::unique_ptr<Transfer> gather_rows(Team& team, const at::Tensor& buffer, int tag) {
  const int64_t bytes = static_cast<int64_t>(buffer.nbytes()) / team.size();
  auto transfer = team.all_gather(buffer.view({-1}).view(at::kByte), {0, bytes, bytes, team.size()}, tag);
  transfer->send();
  return transfer;
}

}  // namespace

// As in an AllReduceSum, values travel as parts of the mean, which is then no larger than they are.
SparseSum::SparseSum(FlatGradients values, at::Tensor rows, at::Tensor gradient, std::shared_ptr<Team> team, int tag,
                     bool has_failed)
    : SumWork(std::move(values)),
      rows_(std::move(rows)),
      gradient_(std::move(gradient)),
      team_(std::move(team)),
      tag_(tag),
      has_failed_(has_failed),
      width_(gradient_.numel() / std::max<int64_t>(1, gradient_.size(0))) {
  gradients_.multiplier = 1.0 / static_cast<double>(team_->size());
}

// Each sum has other rows, so fp16 values have a scale of this sum alone.
void SparseSum::send() {
  gradients_.stats.select(0, kNumSaturated).zero_();
  if (gradients_.wire_dtype == DType::kFloat16) {
    aten::measure(gradients_.grads, gradients_.stats);
    const at::Tensor largest = gradients_.stats.narrow(0, kMaxMagnitude, 1);
    gradients_.scale = at::where(largest > 0, aten::power_of_two(aten::scale_exponent_for(largest)), 1.0F);
  }
  if (gradients_.weight.defined() && gradients_.weight.item<double>() == 0.0) {
    rows_ = rows_.narrow(0, 0, 0);  // they do not count
  }
  const int64_t num_side_values = gradients_.side_values.defined() ? gradients_.side_values.numel() : 0;
  const int64_t length =
      round_up(kNumHeaderNumbers + num_side_values, kMessageAlignment / static_cast<int64_t>(sizeof(double)));
  headers_ = at::zeros({team_->size(), length}, gradients_.stats.options());
  const at::Tensor own = headers_.select(0, team_->rank());
  own.select(0, kNumRows)
      .fill_(has_failed_ ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(rows_.numel()));
  own.select(0, kRowScale).fill_(1.0);
  if (gradients_.scale.defined()) {
    own.narrow(0, kRowScale, 1).copy_(gradients_.scale);
  }
  if (num_side_values > 0) {
    own.narrow(0, kNumHeaderNumbers, num_side_values).copy_(gradients_.side_values);
  }
  headers_come_ = gather_rows(*team_, headers_, tag_);
}

void SparseSum::receive(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] {
    let_go_of_gradients();
    gradient_.reset();
  });
  headers_come_->wait_for_rows();
  use_on_current_stream(headers_);
  const at::Tensor numbers = headers_.narrow(1, 0, kNumHeaderNumbers).cpu();  // the host has to know how much comes
  const bool has_one_failed = numbers.isnan().any().item<bool>();
  const at::Tensor sum = has_one_failed ? sum_of_failure() : gather(numbers);
  if (gradients_.side_values.defined()) {
    const int64_t num_side_values = gradients_.side_values.numel();
    gradients_.side_values = headers_.narrow(1, kNumHeaderNumbers, num_side_values).sum(0).to(at::kFloat);
  }
  headers_come_->wait_until_sent();
  sent_bytes_ += headers_come_->sent_bytes();
  on_reduced();
  take(sum);
  use_memory_on_current_stream();
}

at::Tensor SparseSum::new_sum(const at::Tensor& rows, const at::Tensor& values) const {
  return at::sparse_coo_tensor(rows.unsqueeze(0), values, {gradient_.size(0), width_}).coalesce();
}

at::Tensor SparseSum::sum_of_failure() const {
  const at::Tensor nan = at::full({1, width_}, std::numeric_limits<double>::quiet_NaN(),
                                  rows_.options().dtype(compute_dtype(gradient_.scalar_type())));
  return new_sum(at::zeros({1}, rows_.options()), nan);
}

at::Tensor SparseSum::gather(const at::Tensor& numbers) {
  const auto of_rank = numbers.accessor<double, 2>();
  const auto longest = static_cast<int64_t>(numbers.select(1, kNumRows).max().item<double>());
  const at::ScalarType compute = compute_dtype(gradient_.scalar_type());
  if (longest == 0) {
    return new_sum(rows_, at::empty({0, width_}, rows_.options().dtype(compute)));
  }
  const auto values_at = longest * static_cast<int64_t>(sizeof(int64_t));
  const int64_t length = round_up(values_at + bytes_of(longest * width_, gradients_.wire_dtype), kMessageAlignment);
  memory_ = at::empty({team_->size(), length}, rows_.options().dtype(at::kByte));
  const at::Tensor own = memory_.select(0, team_->rank());
  own.narrow(0, 0, static_cast<int64_t>(rows_.nbytes())).copy_(rows_.view(at::kByte));
  if (rows_.numel() > 0) {
    gradients_.pack_all(advance(own.data_ptr(), values_at));
  }
  const auto transfer = gather_rows(*team_, memory_, tag_ + 1);
  transfer->wait_for_rows();
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> values;
  for (int64_t rank = 0; rank < team_->size(); ++rank) {
    const auto count = static_cast<int64_t>(of_rank[rank][kNumRows]);
    const at::Tensor message = memory_.select(0, rank);
    rows.push_back(message.narrow(0, 0, count * static_cast<int64_t>(sizeof(int64_t))).view(at::kLong));
    const at::Tensor wire = message.narrow(0, values_at, bytes_of(count * width_, gradients_.wire_dtype));
    values.push_back(wire.view(scalar_type_of(gradients_.wire_dtype)).view({count, width_}).to(compute));
    if (of_rank[rank][kRowScale] != 1.0) {
      values.back().div_(of_rank[rank][kRowScale]);
    }
  }
  transfer->wait_until_sent();
  sent_bytes_ += transfer->sent_bytes();
  return new_sum(at::cat(rows), at::cat(values));
}

void SparseSum::take(const at::Tensor& sum) {
  const at::Tensor values = sum._values().mul(gradients_.mean_factor).to(gradient_.scalar_type());
  aten::measure(values, gradients_.stats);
  if (!gradients_.nowhere.empty()) {
    return;
  }
  std::vector<int64_t> sizes = gradient_.sizes().vec();
  sizes.front() = values.size(0);
  gradient_.copy_(at::sparse_coo_tensor(sum._indices(), values.view(sizes), gradient_.sizes(), /*options=*/{},
                                        /*is_coalesced=*/true));
}

}  // namespace fastsync
