#include "transport/liveness.h"

#include <utility>

namespace fastsync {

using Activity = EngineStatus::Activity;

// How old an answer may be after a failed wait. Several buckets fail together, and ask once.
constexpr std::chrono::milliseconds kSameFailure(2500);

Liveness::Liveness(const Group& group, const std::string& engine, std::string join)
    : rank_(group->getRank()),
      join_(std::move(join)),
      heartbeats_(Heartbeats::of(group)),
      shared_(std::make_shared<SharedStatus>()) {
  shared_->status.engine = engine;
  if (heartbeats_) {
    heartbeats_->tell(shared_);
  }
}

void Liveness::move_to(Activity activity, int64_t step, const std::string& why, int64_t agreement) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->status.activity = activity;
  shared_->status.step = step;
  shared_->status.why = why;
  shared_->agreement = agreement;
  shared_->agreeing_since = Heartbeats::Clock::now();
  has_failed_ = false;
}

void Liveness::note_agreeing(int64_t step, const std::string& why, int64_t number) {
  move_to(Activity::kAgreeing, step, why, number);
}

void Liveness::note_averaging(int64_t step) { move_to(Activity::kAveraging, step); }

void Liveness::note_gathering(int64_t step) { move_to(Activity::kGathering, step); }

void Liveness::note_rest() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  if (shared_->status.is_in_step() && !has_failed_) {
    shared_->status.activity = Activity::kResting;
  }
}

void Liveness::note_failed_backward() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->status.activity = Activity::kBackwardFailed;
  has_failed_ = false;
}

void Liveness::pass_agreement(int64_t step, int64_t number) {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  EngineStatus& status = shared_->status;
  if (std::exchange(status.passed_step, step) != step) {
    status.passed.clear();
  }
  if (status.passed.empty() || status.passed.back() != number) {
    status.passed.push_back(number);
  }
}

void Liveness::forget_passed_agreements() {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->status.passed_step = -1;
  shared_->status.passed.clear();
}

std::vector<int64_t> Liveness::ranks_past_agreement() const {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  const int64_t agreement = shared_->agreement;
  const int64_t step = shared_->status.step;
  const auto since = shared_->agreeing_since;
  lock.unlock();
  return heartbeats_ ? heartbeats_->ranks_past(agreement, step, since) : std::vector<int64_t>();
}

std::vector<RankState> Liveness::note_failure() {
  {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    has_failed_ = true;
  }
  failed_ = true;
  return heartbeats_ && asks_ ? heartbeats_->ask(kSameFailure) : std::vector<RankState>();
}

std::vector<int64_t> Liveness::silent_ranks() const {
  std::vector<int64_t> silent;
  for (const RankState& state : heartbeats_ ? heartbeats_->ask() : std::vector<RankState>()) {
    if (!state.answers) {
      silent.push_back(state.rank);
    }
  }
  return silent;
}

}  // namespace fastsync
