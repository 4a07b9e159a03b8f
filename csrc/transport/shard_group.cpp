#include "transport/shard_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "passes/cuda_graphs.h"

namespace fastsync {

std::vector<double> numbers_in(const double* row, int64_t length) {
  const double count = row[0];  // read once, because another process may write to it
  TORCH_CHECK(count >= 0.0 && count < static_cast<double>(length), "a rank gave ", count, " numbers, where there is ",
              "room for ", length - 1);
  return {row + 1, row + 1 + static_cast<int64_t>(count)};
}

ShardGroupByMessages::ShardGroupByMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
                                           int64_t num_numbers, int tag)
    : team_(make_team(std::move(group), device)), ranks_(team_->size()), tag_(tag) {
  constexpr int64_t kAlignment = 8;  // of a row, in numbers
  num_numbers_ = num_numbers / kAlignment * kAlignment + kAlignment;
  std::iota(ranks_.begin(), ranks_.end(), 0);
}

// Each time the rows are others, because messages of a gather that has failed may still arrive in the old ones.
void ShardGroupByMessages::begin_all_gather(const std::vector<double>& numbers) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) < num_numbers_);
  TORCH_CHECK(!is_capturing(team_->device()), "shard_optimizer has the host wait for the other ranks, which cannot ",
              "be part of a CUDA graph; leave it out, or train without the graph");
  const at::Tensor own = at::zeros({num_numbers_}, at::kDouble);
  own.data_ptr<double>()[0] = static_cast<double>(numbers.size());
  std::copy(numbers.begin(), numbers.end(), own.data_ptr<double>() + 1);
  rows_ = at::empty({team_->size(), num_numbers_}, own.options().device(team_->device()));
  rows_[team_->rank()].copy_(own);
  const auto length = static_cast<int64_t>(own.nbytes());
  transfer_ = team_->all_gather(rows_.view({-1}).view(at::kByte), {0, length, length, team_->size()}, tag_);
  transfer_->send();
}

std::vector<std::vector<double>> ShardGroupByMessages::end_all_gather() {
  const auto transfer = std::move(transfer_);
  TORCH_INTERNAL_ASSERT(transfer, "begin_all_gather() comes first");
  transfer->wait_for_rows();
  transfer->wait_until_sent();
  const at::Tensor rows = rows_.cpu();
  std::vector<std::vector<double>> all;
  for (int64_t rank = 0; rank < team_->size(); ++rank) {
    all.push_back(numbers_in(rows.const_data_ptr<double>() + rank * num_numbers_, num_numbers_));
  }
  return all;
}

}  // namespace fastsync
