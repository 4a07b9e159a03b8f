#include "transport/shard_group.h"

#include <ATen/ATen.h>

#include <numeric>
#include <utility>

#include "passes/backend.h"

namespace fastsync {

std::vector<double> numbers_in(const double* row, int64_t length) {
  const double count = row[0];  // read once, because another process may write to it
  TORCH_CHECK(count >= 0.0 && count < static_cast<double>(length), "a rank gave ", count, " numbers, where there is ",
              "room for ", length - 1);
  return {row + 1, row + 1 + static_cast<int64_t>(count)};
}

std::vector<std::vector<double>> numbers_in(const at::Tensor& rows) {
  std::vector<std::vector<double>> all;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    all.push_back(numbers_in(rows.const_data_ptr<double>() + rank * rows.size(1), rows.size(1)));
  }
  return all;
}

ShardGroupByMessages::ShardGroupByMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                                           int64_t num_numbers, int tag)
    : team_(make_team(std::move(group), device)), ranks_(team_->size()), tag_(tag) {
  constexpr int64_t kAlignment = 8;  // of a row, in numbers
  num_numbers_ = num_numbers / kAlignment * kAlignment + kAlignment;
  std::iota(ranks_.begin(), ranks_.end(), 0);
}

void ShardGroupByMessages::begin_all_gather(const std::vector<double>& numbers) {
  begin_all_gather(to_device(numbers, device()));
}

// Each time the rows are others, because messages of a gather that has failed may still arrive in the old ones.
void ShardGroupByMessages::begin_all_gather(const at::Tensor& numbers) {
  TORCH_INTERNAL_ASSERT(numbers.numel() < num_numbers_);
  rows_ = at::zeros({team_->size(), num_numbers_}, numbers.options());
  const at::Tensor own = rows_.select(0, team_->rank());
  own.narrow(0, 0, 1).fill_(numbers.numel());
  own.narrow(0, 1, numbers.numel()).copy_(numbers);
  const auto length = static_cast<int64_t>(own.nbytes());
  transfer_ = team_->all_gather(rows_.view({-1}).view(at::kByte), {0, length, length, team_->size()}, tag_);
  transfer_->send();
}

at::Tensor ShardGroupByMessages::end_on_device() {
  const auto transfer = std::move(transfer_);
  TORCH_INTERNAL_ASSERT(transfer, "begin_all_gather() comes first");
  transfer->wait_for_rows();
  transfer->wait_until_sent();
  return rows_;
}

std::vector<std::vector<double>> ShardGroupByMessages::end_all_gather() { return numbers_in(end_on_device().cpu()); }

}  // namespace fastsync
