#include "engine/lateness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "transport/heartbeats.h"

namespace fastsync {

namespace {

constexpr int64_t kEvery = 16;     // steps
constexpr size_t kRemembered = 6;  // so many times kEvery steps

}  // namespace

// Numbers that did not change need no copy. So between two times that ranks tell each other, the old ones travel.
void Lateness::add_numbers(std::vector<float>& numbers, const StepInfo& step) {
  if (step.num_ranks == 1 || step.is_weighted || !step.device.is_cpu()) {
    begin_anew();
    return;
  }
  tells_ = step.number % kEvery == 0;
  if (tells_) {
    const auto [steps, seconds] = times_.exposed();
    const int64_t new_steps = steps - told_until_.first;
    told_.assign(step.num_ranks, 0.0F);
    if (new_steps > 0) {
      told_[step.rank] = static_cast<float>((seconds - told_until_.second) / static_cast<double>(new_steps));
    }
    told_until_ = {steps, seconds};
  }
  told_.resize(step.num_ranks);
  numbers.insert(numbers.end(), told_.begin(), told_.end());
}

// The next time that ranks tell each other begins the time after. What they tell then is about steps before it, too.
void Lateness::begin_anew() {
  tells_ = false;
  newest_.clear();
  last_.reset();
  late_rank_ = -1;
}

void Lateness::take(const Sums& sums, const StepInfo& step) {
  if (!std::exchange(tells_, false) || sums.numel != step.num_ranks || step.has_failed) {
    return;
  }
  const Clock::time_point now = Clock::now();
  const auto last = std::exchange(last_, now);
  if (!last) {
    return;  // the first steps do much that the others do not
  }
  const auto* const exposed = sums.tensor().const_data_ptr<float>();
  const double all = std::accumulate(exposed, exposed + step.num_ranks, 0.0);
  std::vector<double> waited;
  std::transform(exposed, exposed + step.num_ranks, std::back_inserter(waited), [&](double own) {
    return std::max(0.0, (all - own) / static_cast<double>(step.num_ranks - 1) - own);
  });
  newest_.push_back(waited);
  if (newest_.size() > kRemembered) {
    newest_.pop_front();
  }
  if (step.rank == 0) {
    warn(waited, std::chrono::duration<double>(now - *last).count() / kEvery);
  }
}

std::vector<double> Lateness::waited_for() const {
  std::vector<double> mean(newest_.empty() ? 0 : newest_.back().size());
  for (const std::vector<double>& waited : newest_) {
    for (size_t rank = 0; rank < mean.size(); ++rank) {
      mean[rank] += waited[rank] / static_cast<double>(newest_.size());
    }
  }
  return mean;
}

void Lateness::warn(const std::vector<double>& waited, double step_seconds) {
  const auto longest = std::ranges::max_element(waited);
  const int64_t rank = *longest > share_ * step_seconds ? longest - waited.begin() : -1;
  if (rank != late_rank_) {
    late_rank_ = rank;
    late_since_ = Clock::now();
    has_warned_ = false;
  }
  if (rank < 0 || has_warned_ || Clock::now() - late_since_ < patience_) {
    return;
  }
  has_warned_ = true;
  const int64_t global = global_ranks_of(group_)[rank];
  TORCH_WARN("fastsync: the other ranks wait for rank ", rank, global == rank ? "" : c10::str(" (global ", global, ")"),
             " in each step: ", static_cast<int64_t>(*longest * 1e3 + 0.5), " ms of ",
             static_cast<int64_t>(step_seconds * 1e3 + 0.5),
             ". Look at what its host and its data loader do; stats().waited_for tells it for all ranks");
}

}  // namespace fastsync
