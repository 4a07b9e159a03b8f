#include "transport/shared_team.h"

#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

namespace fastsync {

namespace {

// A chunk's number is this times its sum's number, plus the chunk's index, which counts from 1.
constexpr int64_t kChunksOfASum = 1 << 20;

// The group's time-out, or PyTorch's default if a backend that wraps another one does not tell.
std::chrono::milliseconds limit_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::kCPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;
  }
}

int64_t control_bytes(int64_t size, size_t bytes_of_a_rank) {
  constexpr int64_t kPage = 4096;
  return (size * static_cast<int64_t>(bytes_of_a_rank) + kPage - 1) / kPage * kPage;
}

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
    Numbers& own = team_->numbers_of(team_->rank());
    own[kAnnounced].raise_to(team_->announced_);
    own[phase_].raise_to(number_);
  }

  void wait_for_rows() override {
    RECORD_FUNCTION("fastsync::wait", {});
    team_->wait_for_all(phase_, number_);
    team_->check_announced();
  }

 private:
  std::shared_ptr<SharedTeam> team_;
  size_t phase_;
  int64_t number_;
};

std::shared_ptr<SharedTeam> SharedTeam::make(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             std::shared_ptr<const Host> host, int64_t region_bytes, std::string what) {
  const auto size = static_cast<int64_t>(host->ranks().size());
  auto shared = host->share(group, control_bytes(size, sizeof(Numbers)) + size * region_bytes);
  return std::shared_ptr<SharedTeam>(
      new SharedTeam(group, std::move(host), std::move(shared), region_bytes, std::move(what)));
}

SharedTeam::SharedTeam(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<const Host> host,
                       std::shared_ptr<SharedMemory> shared, int64_t region_bytes, std::string what)
    : Team(group, c10::kCPU, host->ranks()),
      host_(std::move(host)),
      shared_(std::move(shared)),
      what_(std::move(what)),
      process_id_(getpid()),
      has_cores_(size() <= num_usable_cores()) {
  region_bytes_ = region_bytes;
}

// A forked child does not have the memory, and its parent has not left the team.
SharedTeam::~SharedTeam() {
  if (getpid() == process_id_) {
    numbers_of(rank())[kLeft].raise_to(1);
  }
}

SharedTeam::Numbers& SharedTeam::numbers_of(int64_t rank) const {
  return reinterpret_cast<Numbers*>(shared_->data())[rank];
}

at::Tensor SharedTeam::allocate(int64_t bytes) {
  TORCH_INTERNAL_ASSERT(bytes <= region_bytes_, bytes, " bytes do not fit into a region of ", region_bytes_);
  std::byte* data = shared_->data() + control_bytes(size(), sizeof(Numbers));
  std::memset(data + rank() * region_bytes_, 0, bytes);
  return at::from_blob(data, {size() * region_bytes_}, [shared = shared_](void*) {}, at::kByte);
}

// A step that failed and is sent again has the same number, because others may still wait for it. Another thread may
// still drive a sum that failed, and would use the newest number. So this waits until that sum has ended.
void SharedTeam::begin(int64_t step_count, int64_t sum_id) {
  const auto deadline = Waiting::Clock::now() + limit_of(*group_);
  while (!use_.expired()) {
    TORCH_CHECK(Waiting::Clock::now() < deadline, "a sum that has failed did not end");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const int64_t sum = step_count == 0 ? sum_ + 1 : step_count;
  if (sum != sum_) {
    sum_before_ = std::exchange(sum_, sum);
  }
  constexpr int64_t kSumIds = 1 << 20;
  announced_ = sum_id < 0 ? 0 : sum_ * kSumIds + sum_id % kSumIds;
}

// Throws if another rank's rows belong to another sum, so that this rank does not read them.
void SharedTeam::check_announced() const {
  for (int64_t peer = 0; announced_ != 0 && peer < size(); ++peer) {
    TORCH_CHECK(numbers_of(peer)[kAnnounced].value.load(std::memory_order_relaxed) == announced_, "rank ", ranks_[peer],
                " has sent other ", what_, ", or another number of them, than this rank");
  }
}

// If the sum before failed, this rank will never read the rest of its rows, so it says first that it has read them.
std::shared_ptr<void> SharedTeam::use_rows() {
  numbers_of(rank())[kRead].raise_to(sum_before_);
  wait_for_all(kRead, sum_before_);
  num_chunks_.fill(0);
  auto use = std::make_shared<char>();
  use_ = use;
  return use;
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

// After a wait has failed, no other wait begins.
void SharedTeam::wait_for_all(size_t which, int64_t number) {
  const bool is_meeting = which < kPhases && num_meetings_[which] > 0;
  const auto what = [&] {
    return which == kRead ? " to have read the " + what_ + " of the step before"
           : is_meeting   ? " to come to the same optimizer step"
                          : "'s " + what_;
  };
  std::optional<Waiting::Clock::time_point> deadline;
  for (int64_t step = 1; step < size(); ++step) {
    const int64_t peer = (rank() + step) % size();
    SharedNumber& theirs = numbers_of(peer)[which];
    if (theirs.has_reached(number)) {
      continue;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(failure_.empty(), failure_);
    }
    deadline = deadline ? deadline : Waiting::Clock::now() + limit_of(*group_);
    try {
      const auto look = [&] { check_others_are_there(which, number); };
      TORCH_CHECK(waiting_[which].until(theirs, number, has_cores_, *deadline, look), "waited for rank ", ranks_[peer],
                  what(), " until the process group's time-out, ",
                  std::chrono::duration<double>(limit_of(*group_)).count(), " s");
    } catch (const c10::Error& error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure_ = error.what_without_backtrace();
      give_up();
      throw;
    }
  }
}

// Throws if a rank that has not come has failed or left. It looks at all ranks that have not come, because one that has
// failed may be why another one does not come.
void SharedTeam::check_others_are_there(size_t which, int64_t number) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const Numbers& theirs = numbers_of(peer);
    if (peer == rank() || theirs[which].has_reached(number)) {
      continue;
    }
    const bool has_failed = theirs[kGivenUp].has_reached(1);
    const bool has_ended = host_->has_ended(ranks_[peer]);
    const bool has_left = has_ended || theirs[kLeft].has_reached(1);
    const bool is_elsewhere = !has_ended && theirs[kLeft].has_reached(kReplaced);
    TORCH_CHECK(theirs[which].has_reached(number) || !(has_failed || has_left), "rank ", ranks_[peer],
                is_elsewhere ? " has made its buckets anew, as after a parameter was frozen,"
                : has_left   ? " has ended, or has left the process group,"
                             : " has failed,",
                " and this rank waits for it");
  }
}

}  // namespace fastsync
