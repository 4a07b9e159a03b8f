#include "transport/shared_team.h"

#include <ATen/record_function.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace fastsync {

namespace {

// A chunk's number is this times its sum's number, plus the chunk's index, which counts from 1.
constexpr int64_t kChunksOfASum = 1 << 20;

}  // namespace

// Transfers the rows of one chunk in one phase.
class SharedTeam::ChunkTransfer final : public Transfer {
 public:
  ChunkTransfer(std::shared_ptr<SharedTeam> team, size_t phase, int64_t number, int64_t bytes)
      : team_(std::move(team)), phase_(phase), number_(number) {
    sent_bytes_ = bytes;
  }

  // The sum is announced only here, because until now others may have read the rows of the sum before.
  void send() override {
    team_->regions_->raise(kAnnounced, team_->announced_);
    team_->regions_->raise(phase_, number_);
  }

  void wait_for_rows() override {
    RECORD_FUNCTION("fastsync::wait", {});
    team_->regions_->wait_for_all(phase_, number_, team_->sent_);
    team_->check_announced();
  }

 private:
  std::shared_ptr<SharedTeam> team_;
  size_t phase_;
  int64_t number_;
};

SharedTeam::SharedTeam(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<SharedRegions> regions,
                       std::string what)
    : Team(group, c10::kCPU, regions->ranks()),
      regions_(std::move(regions)),
      what_(std::move(what)),
      sent_("'s " + what_),
      read_(" to have read the " + what_ + " of the step before") {
  region_bytes_ = regions_->region_bytes();
}

at::Tensor SharedTeam::allocate(int64_t bytes) {
  TORCH_INTERNAL_ASSERT(bytes <= region_bytes_, bytes, " bytes do not fit into a region of ", region_bytes_);
  const at::Tensor memory = regions_->memory();
  std::memset(static_cast<std::byte*>(memory.data_ptr()) + rank() * region_bytes_, 0, bytes);
  return memory;
}

// A step that failed and is sent again has the same number, because others may still wait for it. Another thread may
// still drive a sum that failed, and would use the newest number. So this waits until that sum has ended. If the sum
// before failed, this rank will never read the rest of its rows, so it says first that it has read them.
std::shared_ptr<void> SharedTeam::begin(const SumNumber& number) {
  const auto deadline = Waiting::Clock::now() + regions_->timeout();
  while (!use_.expired()) {
    TORCH_CHECK(Waiting::Clock::now() < deadline, "a sum that has failed did not end");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const int64_t sum = number.step_count == 0 ? sum_ + 1 : number.step_count;
  if (sum != sum_) {
    sum_before_ = std::exchange(sum_, sum);
  }
  constexpr int64_t kSumIds = 1 << 20;
  announced_ = number.id < 0 ? 0 : sum_ * kSumIds + number.id % kSumIds;
  regions_->raise(kRead, sum_before_);
  regions_->wait_for_all(kRead, sum_before_, read_);
  num_chunks_.fill(0);
  auto use = std::make_shared<char>();
  use_ = use;
  return use;
}

// Throws if another rank's rows belong to another sum, so that this rank does not read them.
void SharedTeam::check_announced() const {
  for (int64_t peer = 0; announced_ != 0 && peer < size(); ++peer) {
    TORCH_CHECK(regions_->number_of(peer, kAnnounced) == announced_, "rank ", ranks_[peer], " has sent other ", what_,
                ", or another number of them, than this rank");
  }
}

std::unique_ptr<Transfer> SharedTeam::next_chunk(int tag, int64_t bytes) {
  const size_t phase = static_cast<size_t>(tag) % kPhases;
  const int64_t chunk = ++num_chunks_[phase];
  TORCH_INTERNAL_ASSERT(chunk < kChunksOfASum);
  return std::make_unique<ChunkTransfer>(shared_from_this(), phase, sum_ * kChunksOfASum + chunk, bytes);
}

std::unique_ptr<Transfer> SharedTeam::all_to_all(const at::Tensor& /*buffer*/, const Rows& from, const Rows& /*to*/,
                                                 int tag) {
  return next_chunk(tag, (size() - 1) * from.length);
}

// A row is written once, however many ranks read it.
std::unique_ptr<Transfer> SharedTeam::all_gather(const at::Tensor& /*buffer*/, const Rows& rows, int tag) {
  return next_chunk(tag, rows.length);
}

}  // namespace fastsync
