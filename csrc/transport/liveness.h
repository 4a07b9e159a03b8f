// Who is missing where a wait for other ranks fails. Each engine notes its state. A thread of the process writes that
// once a second, as a heartbeat, under the rank's key in the group's store. Whoever fails reads the keys of all ranks.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastsync {

// The state of one engine. Thread-safe; touches no Python object.
class Liveness : public std::enable_shared_from_this<Liveness> {
 public:
  // The engine is named in what other ranks are told.
  static std::shared_ptr<Liveness> of(c10d::ProcessGroup& group, const std::string& engine);

  // Waits for the ranks to agree before a step, and why. What they agree on has a number that all of them know, below 0
  // where it is new.
  void agree(int64_t step, const std::string& why, int64_t number);
  // The ranks that never come to that, for they have gone past it. Some seconds late, and empty until then. Never
  // waits.
  std::vector<int64_t> ranks_past_agreement();
  // This rank agrees no more on what has the number, before a step. This and the next two are for every step.
  void pass_agreement(int64_t step, int64_t number);
  // Averages gradients.
  void average(int64_t step) { note("averaging in ", step, ""); }
  // Waits for nobody any more, unless the wait failed: then it stays where it failed.
  void rest();
  // Its backward failed, and it waits for nobody.
  void give_up();

  // To be appended to the error of a wait that failed: which ranks do not answer, and where the others are. Takes a few
  // seconds at most. Empty where there is no store to ask through.
  std::string who_is_missing();

  // The ranks that send no heartbeat: stopped, gone, cut off, or without an engine of this group. Takes as long. None
  // where there is no store to ask through. Throws c10::Error where it does not answer.
  std::vector<int64_t> silent_ranks();

 private:
  friend struct Heartbeat;
  enum class State { kResting, kWaiting, kFailed };

  Liveness(const c10d::ProcessGroup& group, const std::string& engine);
  bool can_ask() const;
  c10::intrusive_ptr<c10d::Store> store() const { return client_ ? client_ : store_.lock(); }
  void note(const char* what, int64_t step, const std::string& why);
  std::string of_step() const { return "step " + std::to_string(step_) + of_engine_; }
  void write(const std::string& waiting, const std::string& passed);
  void look_who_is_past();
  using Heartbeats = std::vector<std::string>;
  // Before and after a while in which there has to be a new one of each rank that lives.
  std::pair<Heartbeats, Heartbeats> ask() const;
  std::string where_ranks_are(const Heartbeats& before, const Heartbeats& after) const;
  // What comes out of the call with these; nothing where the store does not answer in time.
  template <class Result>
  std::optional<Result> answer(Result (*call)(const Liveness&, const Heartbeats&, const Heartbeats&));

  const std::string of_engine_;
  const int64_t rank_;
  const int64_t size_;
  std::vector<uint64_t> global_ranks_;                // empty where they are not known
  const c10::weak_intrusive_ptr<c10d::Store> store_;  // the group's, which may have a server that has to end with it
  c10::intrusive_ptr<c10d::Store> client_;            // of that server; null where there is none
  int64_t answered_ = -1;                             // the newest question, for the thread
  std::mutex mutex_;                                  // guards what follows, down to the next one
  std::string text_;
  int64_t step_ = -1;
  State state_ = State::kResting;
  int64_t agreeing_on_ = -1;  // the number; below 0 where ranks that never come could not be told
  std::chrono::steady_clock::time_point look_at_;
  std::vector<int64_t> ranks_past_;
  int64_t passed_step_ = -1;
  std::vector<int64_t> passed_;  // the numbers, of that step
  std::mutex asking_;            // held by who asks; guards the next two
  std::string told_;
  std::chrono::steady_clock::time_point told_at_;
};

}  // namespace fastsync
