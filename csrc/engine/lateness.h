// Lateness tells how long the other ranks wait for each rank.
//
// Note [Late ranks]
// All ranks end a step's sync at nearly the same time, since each of them needs the last one's gradients. So what the
// sync takes after backward is longer on a rank that came early. Once in a while each rank tells the others how long
// that was. The mean of the others' times, less a rank's own, is how long they waited for it. Ranks that are late in
// turns cancel out. With weights a step waits for the latest rank before it sends the last bucket, so nothing is told,
// and what was told before is over. On a device other than a CPU the times come late, and to read the sums would wait:
// there nothing is told.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "engine/passenger.h"
#include "engine/sync_times.h"

namespace fastsync {

class Lateness final : public Passenger {
 public:
  using Clock = std::chrono::steady_clock;

  // The times and the group must outlive it.
  Lateness(const SyncTimes& times, c10d::ProcessGroup& group) : times_(times), group_(group) {}

  // Rank 0 warns of a rank for which the others wait more than this share of a step, for so many seconds.
  void warn_above(double share, double seconds) { share_ = share, patience_ = std::chrono::duration<double>(seconds); }

  // By rank, how many seconds a step the other ranks have waited for it, over some hundred steps; empty until they are
  // known.
  std::vector<double> waited_for() const;

  void add_numbers(std::vector<float>& numbers, const StepInfo& step) override;
  void take(const Sums& sums, const StepInfo& step) override;

 private:
  void begin_anew();
  void warn(const std::vector<double>& waited, double step_seconds);

  const SyncTimes& times_;
  c10d::ProcessGroup& group_;
  double share_ = 0.2;
  std::chrono::duration<double> patience_{60.0};
  std::vector<float> told_;  // by rank: this rank's time, and zeros
  bool tells_ = false;       // whether the step has a new one
  std::pair<int64_t, double> told_until_{};
  std::deque<std::vector<double>> newest_;  // what ranks waited, as often as they told each other
  std::optional<Clock::time_point> last_;
  int64_t late_rank_ = -1;  // the one that is late now
  Clock::time_point late_since_;
  bool has_warned_ = false;
};

}  // namespace fastsync
