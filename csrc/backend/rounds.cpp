#include "backend/rounds.h"

#include <c10/util/Exception.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace fastsync {

namespace {

constexpr int64_t kControlBytes = 4096;
constexpr int64_t kPlaceBytes = 512 << 10;
constexpr int64_t kMostBytes = 8 << 20;  // of one place of each rank, together
constexpr int64_t kAlignment = 4096;     // of places
// The part of an agreement that tells its round. A rank that writes nothing may be rounds ahead of those who compare.
constexpr uint64_t kRoundMask = 0xFFFF;

constexpr std::chrono::microseconds kAwakeFor(100);
constexpr std::chrono::microseconds kKeepsCore(20);

using Letters = std::array<uint64_t, 5>;

// What has become of a rank. One that has gone may have done its part in all that others still do.
constexpr int64_t kGone = 1;
constexpr int64_t kFailed = 2;

double seconds_of(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

// What a rank tells the others beside what it writes.
struct alignas(128) Rounds::Told {
  SharedNumber round;                                                  // the newest round that it has come to
  SharedNumber state;                                                  // 0, kGone or kFailed
  std::array<std::atomic<uint64_t>, 2> agreement;                      // of its two newest rounds
  std::atomic<int64_t> number;                                         // of its newest collective
  std::array<std::atomic<uint64_t>, std::tuple_size_v<Letters>> name;  // of that: its letters, then zeros
};

Rounds::Rounds(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<const Host> host)
    : host_(std::move(host)),
      rank_(group->getRank()),
      size_(group->getSize()),
      place_bytes_(std::min(kPlaceBytes, kMostBytes / size_ / kAlignment * kAlignment)),
      has_cores_(size_ <= num_usable_cores()),
      process_id_(getpid()),
      memory_(host_->share(group, size_ * bytes_of_a_rank())) {
  static_assert(sizeof(Told) <= kControlBytes);
}

// A forked child does not have the memory, and its parent has not gone.
Rounds::~Rounds() {
  if (getpid() == process_id_) {
    told_by(rank_).state.raise_to(kGone);
  }
}

int64_t Rounds::bytes_of_a_rank() const { return kControlBytes + 2 * place_bytes_; }

Rounds::Told& Rounds::told_by(int64_t rank) const {
  return *reinterpret_cast<Told*>(memory_->data() + rank * bytes_of_a_rank());
}

std::byte* Rounds::place_of(int64_t rank) const {
  return reinterpret_cast<std::byte*>(&told_by(rank)) + kControlBytes + (round_ % 2) * place_bytes_;
}

void Rounds::begin(const Collective& collective, bool beside_caller) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, failure_.empty(), "fastsync: ", collective.name,
                     ": this process group can do no more: ", failure_, "; make a new one");
  }
  TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "fastsync: ", collective.name, ": this process group was aborted");
  collective_ = collective;
  beside_caller_ = beside_caller;
  for (int64_t rank = 0; rank < size_; ++rank) {
    TORCH_CHECK_WITH(DistBackendError, rank == rank_ || !told_by(rank).state.has_reached(kFailed),
                     "fastsync: ", collective.name, ": rank ", rank, " has failed; ", where_is(rank));
  }
  Told& own = told_by(rank_);
  own.number.store(collective.number, std::memory_order_relaxed);
  Letters letters{};
  std::strncpy(reinterpret_cast<char*>(letters.data()), collective.name, sizeof(letters) - 1);
  for (size_t i = 0; i < letters.size(); ++i) {
    own.name[i].store(letters[i], std::memory_order_relaxed);
  }
}

void Rounds::fail(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure_.empty() ? why : failure_;
  }
  told_by(rank_).state.raise_to(kFailed);
}

std::byte* Rounds::writable() {
  for (int64_t step = 1; step < size_; ++step) {
    wait_for((rank_ + step) % size_, round_);
  }
  ++round_;
  std::byte* const place = place_of(rank_);
  --round_;
  return place;
}

void Rounds::arrive() {
  ++round_;
  Told& own = told_by(rank_);
  const uint64_t agreement = (collective_.agreement & ~kRoundMask) | (static_cast<uint64_t>(round_) & kRoundMask);
  own.agreement[round_ % 2].store(agreement, std::memory_order_relaxed);
  own.round.raise_to(round_);
}

const std::byte* Rounds::readable(int64_t rank) {
  if (rank != rank_) {
    wait_for(rank, round_);
    check_agreement(rank);
  }
  return place_of(rank);
}

void Rounds::wait_for_all() {
  for (int64_t step = 1; step < size_; ++step) {
    readable((rank_ + step) % size_);
  }
}

void Rounds::abort() {
  is_aborted_ = true;
  told_by(rank_).state.raise_to(kFailed);
}

void Rounds::wait_for(int64_t rank, int64_t round) {
  SharedNumber& theirs = told_by(rank).round;
  if (theirs.has_reached(round) || comes_soon(theirs, round)) {
    return;
  }
  const auto deadline = Waiting::Clock::now() + collective_.timeout;
  const bool came = waiting_.until(theirs, round, /*has_cores=*/false, deadline, [this, round] { look(round); });
  TORCH_CHECK_WITH(DistBackendError, came, "fastsync: ", collective_.name, ": Timed out waiting ",
                   seconds_of(collective_.timeout), " s for rank ", rank, "; ", where_is(rank));
}

// Waits awake for a moment, because to fall asleep and be woken takes longer than most waits. At first this rank keeps
// its core, as long as another rank takes that computes on another one. Then it lets others run: the rank that is
// waited for may be one of them.
bool Rounds::comes_soon(const SharedNumber& theirs, int64_t round) const {
  const auto began = Waiting::Clock::now();
  const bool keeps_core = has_cores_ && !beside_caller_;
  for (auto now = began; now < began + kAwakeFor; now = Waiting::Clock::now()) {
    if (theirs.has_reached(round)) {
      return true;
    }
    if (!keeps_core || now > began + kKeepsCore) {
      sched_yield();
    }
  }
  return false;
}

// Throws if a rank does not come to the round any more. It looks at all ranks, because one may be why another one does
// not come.
void Rounds::look(int64_t round) const {
  TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "fastsync: ", collective_.name, ": this process group was aborted");
  for (int64_t rank = 0; rank < size_; ++rank) {
    const Told& told = told_by(rank);
    if (rank == rank_ || told.round.has_reached(round)) {
      continue;
    }
    const bool has_ended = host_->has_ended(rank);
    const bool has_failed = told.state.has_reached(kFailed);
    TORCH_CHECK_WITH(DistBackendError, told.round.has_reached(round) || !(has_ended || told.state.has_reached(kGone)),
                     "fastsync: ", collective_.name, ": rank ", rank,
                     has_ended    ? "'s process has ended"
                     : has_failed ? " has failed"
                                  : " has left the process group",
                     "; ", where_is(rank));
  }
}

void Rounds::check_agreement(int64_t rank) const {
  const uint64_t theirs = told_by(rank).agreement[round_ % 2].load(std::memory_order_relaxed);
  const bool is_of_this_round = (theirs & kRoundMask) == (static_cast<uint64_t>(round_) & kRoundMask);
  TORCH_CHECK_WITH(DistBackendError,
                   !is_of_this_round || (theirs & ~kRoundMask) == (collective_.agreement & ~kRoundMask),
                   "fastsync: ", collective_.name, ": rank ", rank,
                   " takes part with another operation, size or dtype; ", where_is(rank));
}

// Tells how far a rank has got, for errors.
std::string Rounds::where_is(int64_t rank) const {
  const Told& told = told_by(rank);
  Letters letters{};
  for (size_t i = 0; i < letters.size(); ++i) {
    letters[i] = told.name[i].load(std::memory_order_relaxed);
  }
  const std::string name(reinterpret_cast<const char*>(letters.data()));
  const std::string newest = name.empty() ? "it has begun none"
                                          : c10::str("its newest collective is number ",
                                                     told.number.load(std::memory_order_relaxed), ", ", name);
  return c10::str(newest, ", and this one is number ", collective_.number);
}

}  // namespace fastsync
