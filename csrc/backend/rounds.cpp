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

// What has become of a rank.
constexpr int64_t kGone = 1;
constexpr int64_t kFailed = 2;

}  // namespace

// What a rank tells the others beside what it writes.
struct alignas(128) Rounds::Told {
  SharedNumber round;                                                  // the newest round that it has come to
  SharedNumber state;                                                  // 0, kGone or kFailed
  std::array<std::atomic<uint64_t>, 2> agreement;                      // of its two newest rounds
  std::atomic<int64_t> waits_for;                                      // a rank, plus 1; 0 if it waits for none
  std::atomic<int64_t> waits_for_round;                                // to which that rank has to come
  std::atomic<int64_t> number;                                         // of its newest collective
  std::array<std::atomic<uint64_t>, std::tuple_size_v<Letters>> name;  // of that: its letters, then zeros
  std::array<char, 512> why;                                           // why it has failed, written before it says so
};

int64_t Rounds::bytes_of_a_rank(int64_t size) {
  static_assert(sizeof(Told) <= kControlBytes);
  return kControlBytes + 2 * std::min(kPlaceBytes, kMostBytes / size / kAlignment * kAlignment);
}

Rounds::Rounds(std::shared_ptr<const Host> host, std::shared_ptr<SharedMemory> memory, int64_t part_bytes)
    : host_(std::move(host)),
      memory_(std::move(memory)),
      part_bytes_(part_bytes),
      size_(static_cast<int64_t>(host_->ranks().size())),
      rank_(std::find(host_->ranks().begin(), host_->ranks().end(), host_->rank()) - host_->ranks().begin()),
      place_bytes_((bytes_of_a_rank(size_) - kControlBytes) / 2),
      has_cores_(size_ <= num_usable_cores()),
      process_id_(getpid()) {}

bool Rounds::is_here() const { return getpid() == process_id_; }

// A forked child's parent has not gone.
Rounds::~Rounds() {
  if (is_here()) {
    told_by(rank_).state.raise_to(kGone);
  }
}

Rounds::Told& Rounds::told_by(int64_t rank) const {
  return *reinterpret_cast<Told*>(memory_->data() + rank * part_bytes_);
}

std::byte* Rounds::place_of(int64_t rank) const {
  return reinterpret_cast<std::byte*>(&told_by(rank)) + kControlBytes + (round_ % 2) * place_bytes_;
}

void Rounds::check(const char* what) const {
  TORCH_CHECK_WITH(DistBackendError, is_here(), "fastsync: ", what,
                   ": this process group was made before this process was forked; make one in each process");
  TORCH_CHECK_WITH(DistBackendError, !is_aborted_, "fastsync: ", what, ": this process group was aborted");
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_WITH(DistBackendError, failure_.empty(), "fastsync: ", what,
                   ": this process group can do no more: ", failure_, "; make a new one");
}

void Rounds::begin(const Collective& collective, bool beside_caller) {
  collective_ = collective;
  beside_caller_ = beside_caller;
  for (int64_t rank = 0; rank < size_; ++rank) {
    TORCH_CHECK_WITH(DistBackendError, rank == rank_ || !told_by(rank).state.has_reached(kFailed),
                     "fastsync: ", collective.name, ": ", loss_of(rank));
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
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) {
    failure_ = why;
    std::strncpy(told_by(rank_).why.data(), why.c_str(), sizeof(Told::why) - 1);
    told_by(rank_).state.raise_to(kFailed);
  }
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
  fail("it was aborted");
}

void Rounds::wait_for(int64_t rank, int64_t round) {
  SharedNumber& theirs = told_by(rank).round;
  if (theirs.has_reached(round) || comes_soon(theirs, round)) {
    return;
  }
  const auto deadline = Waiting::Clock::now() + collective_.timeout;
  Told& own = told_by(rank_);
  own.waits_for_round.store(round, std::memory_order_relaxed);
  own.waits_for.store(rank + 1, std::memory_order_relaxed);
  const bool came = waiting_.until(theirs, round, /*has_cores=*/false, deadline, [this, round] { look(round); });
  own.waits_for.store(0, std::memory_order_relaxed);
  TORCH_CHECK_WITH(DistBackendError, came, "fastsync: ", collective_.name, ": Timed out waiting ",
                   seconds_of(collective_.timeout), " s for ", late_ranks(rank, round));
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
    const std::string loss = loss_of(rank);
    TORCH_CHECK_WITH(DistBackendError, loss.empty() || told.round.has_reached(round), "fastsync: ", collective_.name,
                     ": ", loss);
  }
}

std::string Rounds::loss_of(int64_t rank) const {
  const Told& told = told_by(rank);
  const bool has_failed = told.state.has_reached(kFailed);
  const bool has_left = told.state.has_reached(kGone);
  const bool has_ended = !has_failed && host_->has_ended(host_->ranks()[rank]);
  if (!has_left && !has_ended) {
    return "";
  }
  return c10::str("rank ", host_->ranks()[rank],
                  has_failed  ? c10::str(" has failed: ", told.why.data())
                  : has_ended ? "'s process has ended"
                              : " has left the process group",
                  "; ", where_is(rank));
}

// The rank that is waited for may wait itself. Ranks that have not begun as many collectives as this one are late, too.
std::string Rounds::late_ranks(int64_t waited_for, int64_t round) const {
  int64_t cause = waited_for;
  for (int64_t step = 0; step < size_; ++step) {
    const Told& told = told_by(cause);
    const int64_t next = told.waits_for.load(std::memory_order_relaxed) - 1;
    if (next < 0 || next == rank_ ||
        told_by(next).round.has_reached(told.waits_for_round.load(std::memory_order_relaxed))) {
      break;
    }
    cause = next;
  }
  std::string late = c10::str("rank ", host_->ranks()[cause], "; ", where_is(cause));
  for (int64_t rank = 0; rank < size_; ++rank) {
    const Told& told = told_by(rank);
    const bool has_begun = told.number.load(std::memory_order_relaxed) >= told_by(rank_).number.load();
    if (rank != cause && !has_begun && !told.round.has_reached(round)) {
      late += c10::str("; and for rank ", host_->ranks()[rank], "; ", where_is(rank));
    }
  }
  return late;
}

void Rounds::check_agreement(int64_t rank) const {
  const uint64_t theirs = told_by(rank).agreement[round_ % 2].load(std::memory_order_relaxed);
  const bool is_of_this_round = (theirs & kRoundMask) == (static_cast<uint64_t>(round_) & kRoundMask);
  TORCH_CHECK_WITH(DistBackendError,
                   !is_of_this_round || (theirs & ~kRoundMask) == (collective_.agreement & ~kRoundMask),
                   "fastsync: ", collective_.name, ": rank ", host_->ranks()[rank],
                   " takes part with another operation, size or dtype; ", where_is(rank));
}

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
  return c10::str(newest, ", and this rank's is number ", told_by(rank_).number.load(std::memory_order_relaxed));
}

}  // namespace fastsync
