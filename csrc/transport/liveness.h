// Where an engine is, as other ranks are told when a wait for this rank fails. See Note [Heartbeats].
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/heartbeats.h"
#include "transport/rank_state.h"

namespace fastsync {

// One engine notes here where it is, and asks where the ranks are. Thread-safe; touches no Python object.
class Liveness {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Errors name the engine so. `join` is what a training loop is put inside where ranks have different numbers of
  // batches, or empty if the engine knows no such thing.
  Liveness(const Group& group, const std::string& engine, std::string join = "");

  int64_t rank() const { return rank_; }
  const std::string& join() const { return join_; }

  // The engine waits until the ranks agree, before a step, and why they have to. The number is that of the agreement
  // which the new one replaces, below 0 if there is none.
  void agree(int64_t step, const std::string& why, int64_t number);
  // The ranks that do not come to it, because they go on with the agreement before. Some seconds late. Never waits.
  std::vector<int64_t> ranks_past_agreement() const;
  // In this step the engine does not agree anew on what the number stands for.
  void pass_agreement(int64_t step, int64_t number);
  // The engine averages gradients.
  void average(int64_t step);
  // The engine waits for nobody any more. If a wait has failed, the engine stays where it was then.
  void rest();
  // The engine's backward has failed, and it waits for nobody.
  void give_up();

  // A wait for other ranks has failed: where are they? Takes a few seconds. Empty if there is no store to ask through.
  // Throws c10::Error if the store does not answer.
  std::vector<RankState> fail();

  // The ranks that send no heartbeat: stopped, gone, cut off, or without an engine of this group. Else as fail.
  std::vector<int64_t> silent_ranks() const;

 private:
  void move_to(EngineStatus::Activity activity, int64_t step, const std::string& why = "", int64_t agreement = -1);

  const int64_t rank_;
  const std::string join_;
  const std::shared_ptr<Heartbeats> heartbeats_;  // the group's; null if there are none
  const std::shared_ptr<SharedStatus> shared_;
  bool has_failed_ = false;  // guarded by the status's mutex
};

}  // namespace fastsync
