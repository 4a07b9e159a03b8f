// Who is missing where a wait for other ranks fails. Each engine notes where it stands. A thread of the process writes
// that once a second under the rank's key in the group's store. Whoever fails reads the keys of all ranks.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace fastsync {

// Where one engine stands. Thread-safe; touches no Python object.
class Whereabouts {
 public:
  // The engine is named in what other ranks are told.
  static std::shared_ptr<Whereabouts> of(c10d::ProcessGroup& group, std::string engine);
  ~Whereabouts();

  // Waits for the ranks to agree before a step, and why.
  void agree(int64_t step, std::string why);
  // Averages gradients. This and the next are for every step.
  void average(int64_t step);
  // Its backward failed, and it waits for nobody.
  void give_up();
  // Waits for nobody any more, unless the wait failed: then it stays where it failed.
  void rest();

  // To be appended to the error of a wait that failed: which ranks do not answer, and where the others are. Takes a few
  // seconds at most. Empty where there is no store to ask through.
  std::string roll_call();

 private:
  friend struct RollCall;
  struct Place;
  enum class Phase { kResting, kAgreeing, kAveraging, kGivenUp };

  explicit Whereabouts(std::string engine) : engine_(std::move(engine)) {}

  void enter(Phase phase, int64_t step);
  bool is_resting() const { return phase_.load(std::memory_order_relaxed) == Phase::kResting; }
  std::string text() const;

  const std::string engine_;
  std::shared_ptr<Place> place_;  // null where there is nobody to ask, or no way to
  std::atomic<Phase> phase_ = Phase::kResting;
  std::atomic<int64_t> step_ = -1;
  std::atomic<bool> has_failed_ = false;
  mutable std::mutex mutex_;  // guards why_
  std::string why_;
  std::mutex asking_;  // held by who asks; guards the next two
  std::string told_;
  std::chrono::steady_clock::time_point told_at_;
};

}  // namespace fastsync
