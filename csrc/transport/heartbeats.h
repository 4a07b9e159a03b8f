// Heartbeats tell the ranks of a group where each of them is.
//
// Note [Heartbeats]
// One thread of each process, the sender, writes a heartbeat for each group that has an engine. It does so once a
// second, into the group's store, under the rank's key. The heartbeat tells where the engines of the group are. It also
// tells of engines of other groups that are in a step. A rank that waits in one group does not come to the other
// groups' steps.
//
// Whoever wants to know who is missing has the heartbeats of all ranks read twice, some seconds apart, see Note
// [Roll calls]. A rank whose heartbeat has changed meanwhile lives. The ranks' clocks need not agree for that.
//
// The sender only ever waits for the store. If the store hangs, so does the sender, and nobody waits for it.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/rank_state.h"
#include "transport/store_connection.h"

namespace fastsync {

// The status of an engine, which the engine changes and heartbeats tell.
struct SharedStatus {
  std::mutex mutex;  // guards the other members
  EngineStatus status;
  int64_t agreement = -1;  // while the engine agrees: the agreement that it replaces; below 0 if there is none
  std::chrono::steady_clock::time_point agreeing_since;
};

// The ranks' numbers in the default group, as far as the group tells.
std::vector<int64_t> global_ranks_of(c10d::ProcessGroup& group);

// The heartbeats of one group. Thread-safe; touches no Python object.
class Heartbeats : public std::enable_shared_from_this<Heartbeats> {
 public:
  using Clock = std::chrono::steady_clock;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Returns one object for all engines of the group. Returns null if the ranks have no store that can be used, or if
  // there is one rank. A forked child gets null too, because it must not speak for its parent.
  static std::shared_ptr<Heartbeats> of(const Group& group);

  // From now on heartbeats tell the status, until nobody else holds it.
  void tell(const std::shared_ptr<SharedStatus>& status);

  // Finds out the state of each rank, or returns an answer that is at most so old, and half a
  // second older if another rank had it. Takes some seconds. Throws
  // c10::Error if the store does not answer. Returns nothing in a forked child.
  std::vector<RankState> ask(Clock::duration most_age = {});

  // Returns the ranks that have passed an agreement, in this step or a later one. They do not come to replace it. It
  // returns none before the sender has looked after `since`: some seconds after an engine has begun to agree, and then
  // every few seconds. Never waits.
  std::vector<int64_t> ranks_past(int64_t agreement, int64_t step, Clock::time_point since);

  // Writes the heartbeat, which also tells these statuses of other groups' engines. Looks who has passed agreements if
  // it is time to. Only the sender calls it.
  void beat(std::vector<EngineStatus> others);
  // The statuses of the group's engines that this process still has.
  std::vector<EngineStatus> own_statuses();

  explicit Heartbeats(const Group& group);

 private:
  bool is_time_to_look();
  void look_who_is_past();
  std::vector<std::string> read() const;
  std::vector<RankState> listen() const;

  const pid_t process_id_;
  const int64_t rank_;
  const std::vector<std::string> keys_;      // each rank's key in the store
  const std::vector<int64_t> global_ranks_;  // each rank's number in the default group
  const StoreConnection connection_;
  int64_t answered_ = -1;  // how many questions the sender has answered in a FileStore

  std::mutex mutex_;  // guards the members up to the next mutex; not held while the store is used
  std::vector<std::weak_ptr<SharedStatus>> statuses_;
  Clock::time_point looked_at_;
  std::vector<Heartbeat> seen_;  // each rank's heartbeat, when the sender looked last

  std::mutex asking_;  // held while somebody asks; guards the next members
  std::shared_future<std::vector<RankState>> answer_;
  Clock::time_point asked_at_;
};

}  // namespace fastsync
