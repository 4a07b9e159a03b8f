#include "transport/shared_regions.h"

#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace fastsync {

SharedRegions::SharedRegions(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const Host> host,
                             int64_t region_bytes)
    : group_(std::move(group)),
      host_(std::move(host)),
      rank_(std::ranges::find(ranks(), group_->getRank()) - ranks().begin()),
      region_bytes_(region_bytes),
      process_id_(getpid()),
      has_cores_(size() <= num_usable_cores()),
      shared_(host_->share(group_, control_bytes() + size() * region_bytes)) {}

// A forked child does not have the memory, and its parent has not left.
SharedRegions::~SharedRegions() {
  if (getpid() == process_id_) {
    numbers_of(rank_)[kLeft].raise_to(1);
  }
}

std::chrono::milliseconds SharedRegions::timeout() const {
  try {
    return group_->getBackend(c10::kCPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;
  }
}

int64_t SharedRegions::control_bytes() const {
  constexpr int64_t kPage = 4096;
  return (size() * static_cast<int64_t>(sizeof(Numbers)) + kPage - 1) / kPage * kPage;
}

at::Tensor SharedRegions::memory() const {
  return at::from_blob(
      shared_->data() + control_bytes(), {size() * region_bytes_}, [shared = shared_](void*) {}, at::kByte);
}

int64_t SharedRegions::number_of(int64_t rank, size_t which) const {
  return numbers_of(rank)[which].value.load(std::memory_order_relaxed);
}

void SharedRegions::wait_for_all(size_t which, int64_t number, const std::string& what) {
  std::optional<Waiting::Clock::time_point> deadline;
  for (int64_t step = 1; step < size(); ++step) {
    const int64_t peer = (rank_ + step) % size();
    SharedNumber& theirs = numbers_of(peer)[which];
    if (theirs.has_reached(number)) {
      continue;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(failure_.empty(), failure_);
    }
    deadline = deadline ? deadline : Waiting::Clock::now() + timeout();
    try {
      const auto look = [&] { check_others_are_there(which, number); };
      TORCH_CHECK(waiting_[which].until(theirs, number, has_cores_, *deadline, look), "waited for rank ", ranks()[peer],
                  what, " until the process group's time-out, ", std::chrono::duration<double>(timeout()).count(),
                  " s");
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
void SharedRegions::check_others_are_there(size_t which, int64_t number) const {
  for (int64_t peer = 0; peer < size(); ++peer) {
    const Numbers& theirs = numbers_of(peer);
    if (peer == rank_ || theirs[which].has_reached(number)) {
      continue;
    }
    const bool has_failed = theirs[kGivenUp].has_reached(1);
    const bool has_ended = host_->has_ended(ranks()[peer]);
    const bool has_left = has_ended || theirs[kLeft].has_reached(1);
    const bool is_elsewhere = !has_ended && theirs[kLeft].has_reached(kReplaced);
    TORCH_CHECK(theirs[which].has_reached(number) || !(has_failed || has_left), "rank ", ranks()[peer],
                is_elsewhere ? " has made its buckets anew, as after a parameter was frozen,"
                : has_left   ? " has ended, or has left the process group,"
                             : " has failed,",
                " and this rank waits for it");
  }
}

}  // namespace fastsync
