#include "transport/heartbeats.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <thread>
#include <tuple>
#include <utility>

#include "transport/per_group.h"
#include "transport/roll_call.h"

namespace fastsync {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPeriod(1000);     // between two heartbeats
constexpr milliseconds kListenFor(2500);  // how long ask listens for new heartbeats
constexpr milliseconds kPatience(700);    // how long it waits for another rank's answer after that
constexpr milliseconds kTolerance(500);   // how much older than the question that answer may be
constexpr milliseconds kLimit(7000);      // how long ask waits for the store, which may hang, and for a lost reader
constexpr milliseconds kAtExit(200);      // how long the process's exit waits for the sender's call of a store
constexpr milliseconds kLookEvery(5000);  // longer than a rank that agrees may be held up

const char* const kKey = "fastsync/alive";  // followed by the rank; by itself it counts questions
const char* const kThreadName = "fastsync alive";

std::vector<std::string> keys_of_ranks(int64_t size) {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < size; ++rank) {
    keys.push_back(c10::str(kKey, "/", rank));
  }
  return keys;
}

// The sender: a thread, and the groups whose heartbeats it writes. It is never destroyed, because the thread may hang
// in a call of a store.
struct Sender {
  static Sender* of_this_process();  // null in a forked child
  void beat_all();

  const pid_t process_id = getpid();
  std::mutex mutex;  // guards the groups; not held while a store is used
  PerGroup<std::weak_ptr<Heartbeats>> groups;
  std::timed_mutex using_stores;  // held by the thread
};

Sender* Sender::of_this_process() {
  static Sender* const only = [] {
    auto* const made = new Sender;
    std::thread([made] {
      pthread_setname_np(pthread_self(), kThreadName);
      for (;; std::this_thread::sleep_for(kPeriod)) {
        made->beat_all();
      }
    }).detach();
    // At exit the thread stops using stores, because what stores are made of is torn down next.
    std::atexit([] {
      if (Sender* const own = of_this_process()) {
        std::ignore = own->using_stores.try_lock_for(kAtExit);
      }
    });
    return made;
  }();
  return only->process_id == getpid() ? only : nullptr;
}

void Sender::beat_all() {
  std::vector<std::shared_ptr<Heartbeats>> living;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    groups.for_each([&](const auto& group) { living.push_back(group.lock()); });
  }
  std::erase(living, nullptr);
  std::vector<std::vector<EngineStatus>> in_step;
  for (const auto& group : living) {
    in_step.push_back(group->own_statuses());
    std::erase_if(in_step.back(), [](const EngineStatus& engine) { return !engine.is_in_step(); });
  }
  for (size_t index = 0; index < living.size(); ++index) {
    std::vector<EngineStatus> others;
    for (size_t other = 0; other < living.size(); ++other) {
      if (other != index) {
        others.insert(others.end(), in_step[other].begin(), in_step[other].end());
      }
    }
    const std::lock_guard<std::timed_mutex> lock(using_stores);
    try {
      living[index]->beat(std::move(others));
    } catch (const std::exception&) {  // the store is gone, which ask reports
    }
  }
}

}  // namespace

// Asks the group's backend. One that wraps another backend may not tell: then each rank keeps its number in the group.
std::vector<int64_t> global_ranks_of(c10d::ProcessGroup& group) {
  std::vector<uint64_t> told;
  try {
    told = group.getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {
  }
  std::vector<int64_t> ranks(told.begin(), told.end());
  for (auto rank = static_cast<int64_t>(ranks.size()); rank < group.getSize(); ++rank) {
    ranks.push_back(rank);
  }
  return ranks;
}

std::shared_ptr<Heartbeats> Heartbeats::of(const Group& group) {
  Sender* const sender =
      group->getSize() > 1 && StoreConnection::can_use(group->getStore()) ? Sender::of_this_process() : nullptr;
  if (sender == nullptr) {
    return nullptr;
  }
  {
    const std::lock_guard<std::mutex> lock(sender->mutex);
    if (auto found = sender->groups[group].lock()) {
      return found;
    }
  }
  auto made = std::make_shared<Heartbeats>(group);  // without the lock, because it connects to the store
  const std::lock_guard<std::mutex> lock(sender->mutex);
  std::weak_ptr<Heartbeats>& known = sender->groups[group];
  if (auto found = known.lock()) {  // another thread was faster
    return found;
  }
  known = made;
  return made;
}

Heartbeats::Heartbeats(const Group& group)
    : process_id_(getpid()),
      rank_(group->getRank()),
      keys_(keys_of_ranks(group->getSize())),
      global_ranks_(global_ranks_of(*group)),
      connection_(group->getStore()) {}

void Heartbeats::tell(const std::shared_ptr<SharedStatus>& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  statuses_.push_back(status);
}

// ---- what the sender does -------------------------------------------------------------------------------------------

std::vector<EngineStatus> Heartbeats::own_statuses() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(statuses_, [](const auto& status) { return status.expired(); });
  std::vector<EngineStatus> statuses;
  for (const auto& each : statuses_) {
    if (const auto shared = each.lock()) {
      const std::lock_guard<std::mutex> status_lock(shared->mutex);
      statuses.push_back(shared->status);
    }
  }
  return statuses;
}

// A TCPStore that hangs does not hold up the heartbeats of other groups here, because set waits for no answer. It does
// while the sender looks who has passed an agreement.
void Heartbeats::beat(std::vector<EngineStatus> others) {
  std::vector<EngineStatus> own = own_statuses();
  if (own.empty()) {
    return;
  }
  others.insert(others.end(), std::make_move_iterator(own.begin()), std::make_move_iterator(own.end()));
  const auto store = connection_.store();
  bool is_wanted = true;
  if (connection_.is_file()) {
    const int64_t questions = store->check({kKey}) ? std::stoll(store->get_to_str(kKey)) : 0;
    is_wanted = std::exchange(answered_, questions) != questions;
  }
  if (is_wanted) {
    store->set(keys_[rank_], to_text({milliseconds_since_1970(), std::move(others)}));
  }
  if (is_time_to_look()) {
    look_who_is_past();
  }
}

bool Heartbeats::is_time_to_look() {
  const auto now = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  return now - looked_at_ >= kLookEvery && std::ranges::any_of(statuses_, [&](const auto& each) {
           const auto shared = each.lock();
           if (!shared) {
             return false;
           }
           const std::lock_guard<std::mutex> status_lock(shared->mutex);
           return shared->status.activity == EngineStatus::Activity::kAgreeing && shared->agreement >= 0 &&
                  now - shared->agreeing_since >= kLookEvery;
         });
}

// An old heartbeat does no harm, because a rank does not come back to an agreement that it has passed.
void Heartbeats::look_who_is_past() {
  std::vector<Heartbeat> seen;
  for (const std::string& text : read()) {
    seen.push_back(heartbeat_from(text));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  looked_at_ = Clock::now();
  seen_ = std::move(seen);
}

std::vector<int64_t> Heartbeats::ranks_past(int64_t agreement, int64_t step, Clock::time_point since) {
  std::vector<int64_t> ranks;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t rank = 0; agreement >= 0 && looked_at_ >= since && rank < seen_.size(); ++rank) {
    const auto is_past = [&](const EngineStatus& engine) { return engine.has_passed(agreement, step); };
    if (static_cast<int64_t>(rank) != rank_ && std::ranges::any_of(seen_[rank].engines, is_past)) {
      ranks.push_back(static_cast<int64_t>(rank));
    }
  }
  return ranks;
}

// ---- how a rank asks ------------------------------------------------------------------------------------------------

// In a FileStore a heartbeat is written only once somebody has asked.
std::vector<std::string> Heartbeats::read() const {
  if (connection_.is_file()) {
    connection_.store()->add(kKey, 1);
  }
  return connection_.get(keys_);
}

std::vector<RankState> Heartbeats::listen() const {
  const RollCall call{kKey, rank_, kListenFor, kPatience, kTolerance, /*only_answers=*/connection_.is_file()};
  std::vector<RankState> states = call.run(connection_, [this] { return read(); });
  for (RankState& state : states) {
    state.global_rank = global_ranks_.at(state.rank);
  }
  return states;
}

// Listens on a thread of its own, because the store may hang.
std::vector<RankState> Heartbeats::ask(Clock::duration most_age) {
  if (getpid() != process_id_) {
    return {};
  }
  const std::lock_guard<std::mutex> lock(asking_);
  try {
    if (!answer_.valid() || Clock::now() - asked_at_ > most_age) {
      std::packaged_task<std::vector<RankState>()> task([self = shared_from_this()] {
        pthread_setname_np(pthread_self(), kThreadName);
        return self->listen();
      });
      answer_ = task.get_future();
      std::thread(std::move(task)).detach();
      answer_.wait_for(kLimit);
      asked_at_ = Clock::now();
    }
    if (answer_.wait_for(milliseconds(0)) == std::future_status::ready) {
      return answer_.get();
    }
  } catch (const std::exception&) {  // the store has thrown
  }
  C10_THROW_ERROR(Error, c10::str("the store of their group does not answer",
                                  connection_.is_file()
                                      ? ""
                                      : ": the process that holds it, the launcher or rank 0's, is stopped or gone"));
}

}  // namespace fastsync
