// Liveness notes where an engine is. If another rank waits for this one in vain, its error tells that. See Note
// [Heartbeats].
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/heartbeats.h"
#include "transport/rank_state.h"

namespace fastsync {

// One engine notes here where it is, and asks where the other ranks are. Thread-safe; touches no Python object.
class Liveness {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Errors name the engine and `join`, the context in which ranks may have different numbers of batches. `join` is
  // empty if the engine has no such context.
  Liveness(const Group& group, const std::string& engine, std::string join = "");

  int64_t rank() const { return rank_; }
  std::string join() const { return is_joining_ ? "" : join_; }
  // Sets whether this rank is in that context. Then errors do not name it.
  void set_joining(bool is_joining) { is_joining_ = is_joining; }

  // The next four functions are explained in Note [Agreement], in engine/bucket.h.

  // Notes that the engine waits until the ranks agree, before a step, and why they have to. `number` is that of the
  // agreement which the new one replaces; below 0 if there is none.
  void note_agreeing(int64_t step, const std::string& why, int64_t number);
  // Returns the ranks that do not come to agree, because they have passed the agreement that is to be replaced. It
  // finds out some seconds late, and never waits.
  std::vector<int64_t> ranks_past_agreement() const;
  // Notes that the engine passes the agreement of this number in this step.
  void pass_agreement(int64_t step, int64_t number);
  // Forgets what was passed, because steps are counted from another number on. So the ranks may agree in a step that
  // has been before.
  void forget_passed_agreements();
  // Notes that the engine averages gradients.
  void note_averaging(int64_t step);
  // Notes that the engine gathers parameters.
  void note_gathering(int64_t step);
  // Notes that the engine waits for nobody any more. If a wait has failed, the note of that wait stays.
  void note_rest();
  // Notes that the engine's backward has failed, so that it waits for nobody.
  void note_failed_backward();

  // Notes that a wait for other ranks has failed, and returns where they are. Takes a few seconds. Returns nothing if
  // there is no store to ask through. Throws c10::Error if the store does not answer.
  std::vector<RankState> note_failure();

  // For who finds out in another way which ranks are lost: note_failure returns nothing from now on, at once.
  void ask_nobody() { asks_ = false; }
  // Returns whether a wait has failed since the last call.
  bool take_failure() { return failed_.exchange(false); }

  // Returns the ranks that send no heartbeat: they are stopped, gone, cut off, or without an engine of this group.
  // Takes as long as note_failure, and throws as it does.
  std::vector<int64_t> silent_ranks() const;

 private:
  void move_to(EngineStatus::Activity activity, int64_t step, const std::string& why = "", int64_t agreement = -1);

  const int64_t rank_;
  const std::string join_;
  std::atomic<bool> is_joining_ = false;
  const std::shared_ptr<Heartbeats> heartbeats_;  // the group's; null if there are none
  const std::shared_ptr<SharedStatus> shared_;
  bool has_failed_ = false;  // guarded by the status's mutex
  std::atomic<bool> asks_ = true;
  std::atomic<bool> failed_ = false;  // whether a wait has failed since take_failure
};

}  // namespace fastsync
