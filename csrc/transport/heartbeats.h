// The heartbeats by which ranks of a group tell each other where they are.
//
// Note [Heartbeats]
// A thread of each process writes a heartbeat for each group that has an engine: once a second, into the group's store,
// under the rank's key. It tells where the engines of the group are. If engines of other groups are in a step, it tells
// that too, because a rank that waits in one group does not come to the other groups' steps.
// A rank that wants to know who is missing reads the heartbeats of all ranks twice, some seconds apart. A rank whose
// heartbeat has changed meanwhile lives. The ranks' clocks need not agree for that.
// The thread only ever waits for the store. If the store hangs, so does the thread, and nobody waits for it.
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
  std::mutex mutex;  // guards the others
  EngineStatus status;
  int64_t agreement = -1;  // the number of what the engine agrees on anew; below 0 if nobody can have passed it
  std::chrono::steady_clock::time_point agreeing_since;
};

// Those of one group. Thread-safe; touches no Python object.
class Heartbeats : public std::enable_shared_from_this<Heartbeats> {
 public:
  using Clock = std::chrono::steady_clock;
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // One for all engines of the group. Null if the ranks have no store to tell each other by, if there is one rank, and
  // in a forked child, which must not speak for its parent.
  static std::shared_ptr<Heartbeats> of(const Group& group);

  // From now on heartbeats tell the status, until nobody else holds it.
  void tell(const std::shared_ptr<SharedStatus>& status);

  // The state of each rank, or an answer that is at most so old. Takes some seconds. Throws c10::Error if the store
  // does not answer. Empty in a forked child.
  std::vector<RankState> ask(Clock::duration most_age = {});

  // The ranks that do not come to an agreement because they have passed it, as far as this process knows. It looks some
  // seconds after an engine has begun to agree, and then every few seconds. Never waits.
  std::vector<int64_t> ranks_past(int64_t agreement, int64_t step);

  // Sends the heartbeat, which also tells these statuses of other groups' engines, and looks who has passed agreements.
  void beat(std::vector<EngineStatus> others);
  // The statuses of the group's engines that are left.
  std::vector<EngineStatus> own_statuses();

  explicit Heartbeats(const Group& group);

 private:
  bool is_time_to_look();
  void look_who_is_past();
  std::vector<std::string> read() const;
  std::vector<RankState> listen() const;

  const pid_t process_id_;
  const int64_t rank_;
  const std::vector<std::string> keys_;      // of all ranks
  const std::vector<int64_t> global_ranks_;  // of all ranks
  const StoreConnection connection_;
  int64_t answered_ = -1;  // how many questions the thread has seen in a FileStore

  std::mutex mutex_;  // guards what follows, up to the next mutex; not held while the store is used
  std::vector<std::weak_ptr<SharedStatus>> statuses_;
  Clock::time_point looked_at_;
  std::vector<Heartbeat> seen_;  // of all ranks, when it looked last

  std::mutex asking_;  // held by who asks; guards what follows
  std::shared_future<std::vector<RankState>> answer_;
  Clock::time_point asked_at_;
};

}  // namespace fastsync
