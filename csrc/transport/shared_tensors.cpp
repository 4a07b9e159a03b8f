#include "transport/shared_tensors.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace fastsync {

namespace {

// The numbers that a rank raises.
constexpr size_t kGathers = 0;
constexpr size_t kBarriers = 1;

// A rank writes its numbers to one of two places by turns. When it comes to a place again, all ranks have read what was
// there, because each has begun another gather since.
constexpr int64_t kTurns = 2;

const std::string kWhat = " to come to the same optimizer step";

int64_t round_up(int64_t bytes) {
  constexpr int64_t kAlignment = 4096;
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

SharedTensors::SharedTensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, int64_t num_numbers)
    : num_numbers_(num_numbers + 1),
      tensors_begin_(round_up(kTurns * group->getSize() * num_numbers_ * static_cast<int64_t>(sizeof(double)))) {
  Teams teams(group, c10::kCPU);
  if (teams.can_share() && teams.hosts().num_nodes > 0) {
    teams.make_room(round_up((tensors_begin_ + bytes) / teams.hosts().num_local_ranks + 1));
  }
  if (!teams.shared()) {
    const std::string& reason = teams.why_not_shared();
    throw NoSharedTensors(
        c10::str("optimizer: the ranks cannot have one copy of the parameters, because ",
                 reason.empty() ? "their process group is not Gloo's, or no two are on one host" : reason,
                 ". Leave shard_optimizer out, on every rank: then each rank steps all parameters"),
        reason);
  }
  regions_ = teams.shared()->regions();
  memory_ = regions_->memory();
  regions_->keep_in_children();
}

at::Tensor SharedTensors::tensor(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides,
                                 at::ScalarType dtype) const {
  std::byte* const begin = static_cast<std::byte*>(memory_.data_ptr()) + tensors_begin_ + offset;
  return at::from_blob(begin, sizes, strides, [kept = memory_](void*) {}, at::TensorOptions().dtype(dtype));
}

double* SharedTensors::numbers_of(int64_t rank) const {
  const int64_t place = num_gathers_ % kTurns * regions_->size() + rank;
  return static_cast<double*>(memory_.data_ptr()) + place * num_numbers_;
}

void SharedTensors::begin_all_gather(const std::vector<double>& numbers) {
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(numbers.size()) < num_numbers_);
  num_gathers_ += 1;
  double* const own = numbers_of(regions_->rank());
  own[0] = static_cast<double>(numbers.size());
  std::copy(numbers.begin(), numbers.end(), own + 1);
  regions_->raise(kGathers, num_gathers_);
}

std::vector<std::vector<double>> SharedTensors::end_all_gather() {
  regions_->wait_for_all(kGathers, num_gathers_, kWhat);
  std::vector<std::vector<double>> all;
  for (int64_t rank = 0; rank < regions_->size(); ++rank) {
    all.push_back(numbers_in(numbers_of(rank), num_numbers_));
  }
  return all;
}

void SharedTensors::barrier() {
  regions_->raise(kBarriers, ++num_barriers_);
  regions_->wait_for_all(kBarriers, num_barriers_, kWhat);
}

}  // namespace fastsync
