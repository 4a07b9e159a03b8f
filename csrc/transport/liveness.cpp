#include "transport/liveness.h"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
#include <utility>

namespace fastsync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kPeriod(1000);     // between two heartbeats
constexpr milliseconds kPatience(2500);   // with ranks that have none
constexpr milliseconds kLimit(4000);      // for the store, which may hang
constexpr milliseconds kMoment(200);      // at the process's end
constexpr milliseconds kLookEvery(5000);  // while ranks agree: longer than a rank may be held up for

const char* const kKey = "fastsync/alive";
const char* const kNoAnswer = "no answer, so it is stopped or gone, or has no engine of this group";
const char* const kThreadName = "fastsync alive";

template <class Kind>
const Kind* as(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<const Kind*>(prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get());
}

// By the port of its peer, which stands at one place in both kinds of addresses.
bool is_connected(int file, uint16_t port) {
  sockaddr_in6 peer{};
  socklen_t length = sizeof(peer);
  pollfd hung_up{file, POLLRDHUP, 0};
  return getpeername(file, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && ntohs(peer.sin6_port) == port &&
         poll(&hung_up, 1, /*timeout=*/0) == 0;
}

// Throws where the server of a TCPStore has ended. Its client would warn of that, with a stack trace, as at the end of
// a job whose rank 0 holds the store and ends first. The client does not tell which socket is its own.
void check_server(const StorePtr& store) {
  bool is_there = store.defined();
  if (const auto* const tcp = as<c10d::TCPStore>(store)) {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    is_there = std::any_of(begin(files), end(files), [&](const auto& file) {
      return is_connected(std::stoi(file.path().filename()), tcp->getPort());
    });
  }
  TORCH_CHECK(is_there, "the store is gone");
}

// A connection of our own to the server of a TCPStore: the group's is held for as long as somebody waits in it, as
// dist.new_group() does. One for all engines of a group. Null for another store, and where the server is gone.
StorePtr client_of(const StorePtr& store) {
  static std::mutex mutex;
  static auto& clients = *new std::map<const c10d::Store*, c10::weak_intrusive_ptr<c10d::Store>>();
  if (as<c10d::TCPStore>(store) == nullptr) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(clients, [](const auto& entry) { return entry.second.expired(); });
  const auto found = clients.find(store.get());
  StorePtr client = found == clients.end() ? nullptr : found->second.lock();
  try {
    client = client ? client : store->clone();
    clients.insert_or_assign(store.get(), c10::weak_intrusive_ptr<c10d::Store>(client));
  } catch (const std::exception&) {
  }
  return client;
}

int64_t now() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string key_of(int64_t rank) { return c10::str(kKey, "/", rank); }

// The heartbeats of all ranks. Empty of those that have written none.
std::vector<std::string> heartbeats_in(c10d::Store& store, int64_t size) {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < size; ++rank) {
    keys.push_back(key_of(rank));
  }
  if (!store.check(keys)) {
    for (const std::string& key : keys) {
      store.compareSet(key, std::string(), std::string());  // for multiGet waits for those that are not there
    }
  }
  std::vector<std::string> heartbeats;
  for (const auto& bytes : store.multiGet(keys)) {
    heartbeats.emplace_back(bytes.begin(), bytes.end());
  }
  return heartbeats;
}

// A heartbeat: when, by the rank's own clock, which agreements it has passed, and its state.
std::string heartbeat_of(const std::string& passed, const std::string& state) {
  return c10::str(now(), " ", passed, "| ", state);
}

std::string entry_of(int64_t number, int64_t step) { return c10::str(number, ":", step, " "); }

std::string state_of(const std::string& heartbeat) {
  const size_t end = heartbeat.find("| ");
  return end == std::string::npos ? "" : heartbeat.substr(end + 2);
}

bool has_passed(const std::string& heartbeat, int64_t number, int64_t step) {
  std::istringstream words(heartbeat.substr(0, heartbeat.find('|')));
  std::string word;
  while (words >> word) {
    const size_t colon = word.find(':');
    if (colon != std::string::npos && std::stoll(word) == number && std::stoll(word.substr(colon + 1)) >= step) {
      return true;
    }
  }
  return false;
}

// By the heartbeats of a rank before and after a while in which there had to be a new one. What was last heard through
// a file may be of long ago, for there a rank writes when it is asked.
std::string state_in(const std::string& before, const std::string& after, bool is_file) {
  const std::string state = state_of(after);
  if (before != after) {
    return state;
  }
  const int64_t seconds = std::max<int64_t>(0, now() - std::atoll(after.c_str())) / 1000;
  return kNoAnswer + (after.empty() || is_file ? "" : c10::str(", last heard of ", seconds, " s ago: ", state));
}

}  // namespace

// ---- what is in the store -------------------------------------------------------------------------------------------

// To a TCPStore it waits for no answer, so that a store that hangs holds nobody up. A FileStore keeps all that was ever
// written: there a rank writes at first, and when somebody has asked.
void Liveness::write(const std::string& waiting, const std::string& passed) {
  const StorePtr to = store();
  check_server(to);
  if (as<c10d::FileStore>(to) != nullptr) {
    const int64_t number = to->check({kKey}) ? std::stoll(to->get_to_str(kKey)) : 0;
    if (std::exchange(answered_, number) == number) {
      return;
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const std::string text = waiting.empty() ? text_ : waiting;
  lock.unlock();
  to->set(key_of(rank_), heartbeat_of(passed, text));
}

// What ranks have passed stays true. So one look is enough, and it does no harm that the newest heartbeats are not
// here.
void Liveness::look_who_is_past() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (agreeing_on_ < 0 || state_ != State::kWaiting || Clock::now() < look_at_) {
    return;
  }
  look_at_ = Clock::now() + kLookEvery;
  const int64_t number = agreeing_on_;
  const int64_t step = step_;
  lock.unlock();
  const StorePtr from = store();
  check_server(from);
  if (as<c10d::FileStore>(from) != nullptr) {
    from->add(kKey, 1);
  }
  const auto heartbeats = heartbeats_in(*from, size_);
  lock.lock();
  for (int64_t rank = 0; agreeing_on_ == number && step_ == step && rank < size_; ++rank) {
    if (rank != rank_ && has_passed(heartbeats[rank], number, step) && !std::ranges::count(ranks_past_, rank)) {
      ranks_past_.push_back(rank);
    }
  }
}

std::pair<Liveness::Heartbeats, Liveness::Heartbeats> Liveness::ask() const {
  const StorePtr from = store();
  check_server(from);
  from->add(kKey, 1);
  Heartbeats before = heartbeats_in(*from, size_);
  std::this_thread::sleep_for(kPatience);
  return {std::move(before), heartbeats_in(*from, size_)};
}

// First who is missing, then who is elsewhere, last who is where this rank is.
std::string Liveness::where_ranks_are(const Heartbeats& before, const Heartbeats& after) const {
  std::map<std::pair<int, std::string>, std::string> ranks_at;
  const bool is_file = as<c10d::FileStore>(store()) != nullptr;
  const std::string mine = state_in(before[rank_], after[rank_], is_file);
  for (int64_t rank = 0; rank < size_; ++rank) {
    const std::string at = state_in(before[rank], after[rank], is_file);
    std::string& ranks = ranks_at[{at.starts_with(kNoAnswer) ? 0 : at == mine ? 2 : 1, at}];
    ranks += c10::str(ranks.empty() ? "rank " : ", ", rank);
    if (!global_ranks_.empty() && global_ranks_[rank] != static_cast<uint64_t>(rank)) {
      ranks += c10::str(" (global ", global_ranks_[rank], ")");
    }
  }
  std::string text;
  for (const auto& [at, ranks] : ranks_at) {
    text += c10::str(text.empty() ? ". Where the ranks are: " : "; ", ranks, ": ", at.second);
  }
  return text;
}

// ---- what the process does ------------------------------------------------------------------------------------------

// The engines of this process, and a thread that writes for them. Never destroyed, for the thread may be in a call of a
// store that hangs. Children that are forked do without: the connections are their parent's.
struct Heartbeat {
  static Heartbeat* of_this_process();  // null in a forked child
  void write_all();

  const pid_t process_id = getpid();
  std::mutex mutex;  // guards the next; never held during a call of a store
  std::vector<std::weak_ptr<Liveness>> engines;
  std::timed_mutex writing;  // held during a call of a store by the thread
};

Heartbeat* Heartbeat::of_this_process() {
  static Heartbeat* const only = [] {
    auto* const made = new Heartbeat;
    std::thread([made] {
      pthread_setname_np(pthread_self(), kThreadName);
      for (;; std::this_thread::sleep_for(kPeriod)) {
        made->write_all();
      }
    }).detach();
    // For good: what stores are made of is torn down next.
    std::atexit([] {
      if (Heartbeat* const own = of_this_process()) {
        std::ignore = own->writing.try_lock_for(kMoment);
      }
    });
    return made;
  }();
  return only->process_id == getpid() ? only : nullptr;
}

// A rank is where one of its engines waits, for whatever group; else where its engine of the group has been last.
void Heartbeat::write_all() {
  std::vector<std::shared_ptr<Liveness>> living;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(engines, [](const auto& engine) { return engine.expired(); });
    for (const auto& engine : engines) {
      living.push_back(engine.lock());
    }
  }
  std::erase(living, nullptr);
  std::string waiting;
  std::string passed;
  for (const auto& engine : living) {
    const std::lock_guard<std::mutex> lock(engine->mutex_);
    if (engine->state_ != Liveness::State::kResting) {
      waiting += (waiting.empty() ? "" : " and ") + engine->text_;
    }
    for (const int64_t number : engine->passed_) {
      passed += entry_of(number, engine->passed_step_);
    }
  }
  for (const auto& engine : living) {
    const std::lock_guard<std::timed_mutex> lock(writing);
    try {
      engine->write(waiting, passed);
      engine->look_who_is_past();
    } catch (const std::exception&) {  // the store is gone: whoever asks is told
    }
  }
}

// ---- what an engine notes -------------------------------------------------------------------------------------------

Liveness::Liveness(const c10d::ProcessGroup& group, const std::string& engine)
    : of_engine_(" of " + engine),
      rank_(group.getRank()),
      size_(group.getSize()),
      store_(group.getStore()),
      text_("not yet in a sync" + of_engine_) {
  try {
    global_ranks_ = group.getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {  // a backend around another one may not tell
  }
}

std::shared_ptr<Liveness> Liveness::of(c10d::ProcessGroup& group, const std::string& engine) {
  std::shared_ptr<Liveness> liveness(new Liveness(group, engine));
  if (liveness->can_ask()) {
    liveness->client_ = client_of(group.getStore());
    Heartbeat& heartbeat = *Heartbeat::of_this_process();
    const std::lock_guard<std::mutex> lock(heartbeat.mutex);
    heartbeat.engines.push_back(liveness);
  }
  return liveness;
}

// A store may also be Python's, and the thread never has the GIL.
bool Liveness::can_ask() const {
  const StorePtr store = this->store();
  return size_ > 1 && (as<c10d::TCPStore>(store) != nullptr || as<c10d::FileStore>(store) != nullptr) &&
         Heartbeat::of_this_process() != nullptr;
}

void Liveness::agree(int64_t step, const std::string& why, int64_t number) {
  note("agreeing before ", step, ", because " + why);
  const std::lock_guard<std::mutex> lock(mutex_);
  agreeing_on_ = number;
  look_at_ = Clock::now() + kLookEvery;
}

std::vector<int64_t> Liveness::ranks_past_agreement() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ranks_past_;
}

void Liveness::pass_agreement(int64_t step, int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(passed_step_, step) != step) {
    passed_.clear();
  }
  passed_.push_back(number);
}

void Liveness::note(const char* what, int64_t step, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  agreeing_on_ = -1;
  ranks_past_.clear();
  step_ = step;
  text_ = what + of_step() + why;
  state_ = State::kWaiting;
}

void Liveness::rest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kWaiting) {
    text_ = "in no sync, after " + of_step();
    state_ = State::kResting;
  }
}

void Liveness::give_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  text_ = "past " + of_step() + ", in which its backward failed";
  state_ = State::kWaiting;
}

// On a thread of its own, for a store may hang.
template <class Result>
std::optional<Result> Liveness::answer(Result (*call)(const Liveness&, const Heartbeats&, const Heartbeats&)) {
  try {
    std::packaged_task<Result()> task([self = shared_from_this(), call] {
      pthread_setname_np(pthread_self(), kThreadName);
      const auto [before, after] = self->ask();
      return call(*self, before, after);
    });
    auto answered = task.get_future();
    std::thread(std::move(task)).detach();
    if (answered.wait_for(kLimit) == std::future_status::ready) {
      return answered.get();
    }
  } catch (const std::exception&) {  // of the store's
  }
  return std::nullopt;
}

std::vector<int64_t> Liveness::silent_ranks() {
  const auto silent = [](const Liveness&, const Heartbeats& before, const Heartbeats& after) {
    std::vector<int64_t> ranks;
    for (size_t rank = 0; rank < after.size(); ++rank) {
      if (before[rank] == after[rank]) {
        ranks.push_back(static_cast<int64_t>(rank));
      }
    }
    return ranks;
  };
  if (!can_ask()) {
    return {};
  }
  const auto answered = answer<std::vector<int64_t>>(silent);
  TORCH_CHECK(answered, "the store of the process group does not answer");
  return *answered;
}

std::string Liveness::who_is_missing() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    state_ = State::kFailed;
  }
  if (!can_ask()) {
    return "";
  }
  const std::lock_guard<std::mutex> lock(asking_);
  if (!told_.empty() && Clock::now() - told_at_ <= kPatience) {  // another bucket has just asked
    return told_;
  }
  const auto told = answer<std::string>([](const Liveness& self, const Heartbeats& before, const Heartbeats& after) {
    return self.where_ranks_are(before, after);
  });
  told_at_ = Clock::now();
  if (told) {
    return told_ = *told;
  }
  told_ = ". Where the other ranks are is not known, for the store of their group does not answer";
  told_ += as<c10d::TCPStore>(store()) == nullptr
               ? ""
               : ": the process that holds it, the launcher or rank 0's, is stopped or gone";
  return told_;
}

}  // namespace fastsync
