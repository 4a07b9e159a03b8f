#include "transport/roll_call.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
#include <utility>
#include <vector>

namespace fastsync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr milliseconds kPeriod(1000);    // between two words of a rank
constexpr milliseconds kPatience(3000);  // with ranks that say nothing new
constexpr milliseconds kLimit(4000);     // for the store, which may hang
constexpr milliseconds kMoment(200);     // at the process's end

const char* const kQuestion = "fastsync/where";
const char* const kNoAnswer = "no answer, so it is stopped or gone, or has no engine of this group";
const char* const kThreadName = "fastsync calls";

template <class Kind>
const Kind* as(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<const Kind*>(prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get());
}

// One that a thread may use that never has the GIL: a store may also be Python's.
bool is_usable(const StorePtr& store) {
  return as<c10d::TCPStore>(store) != nullptr || as<c10d::FileStore>(store) != nullptr ||
         as<c10d::HashStore>(store) != nullptr;
}

// By the port of its peer, which stands at one place in both kinds of addresses.
bool is_connected(int socket, uint16_t port) {
  sockaddr_in6 peer{};
  socklen_t length = sizeof(peer);
  tcp_info info{};
  socklen_t info_length = sizeof(info);
  return getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && ntohs(peer.sin6_port) == port &&
         getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &info_length) == 0 && info.tcpi_state == TCP_ESTABLISHED;
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

std::string key_of(int64_t rank) { return c10::str(kQuestion, "/", rank); }

int64_t now() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The words of all ranks: when, by their own clocks, and where they stand. Empty of those that have written none.
std::vector<std::string> words_in(c10d::Store& store, int64_t size) {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < size; ++rank) {
    keys.push_back(key_of(rank));
  }
  if (!store.check(keys)) {
    for (const std::string& key : keys) {
      store.compareSet(key, std::string(), std::string());  // for multiGet waits for those that are not there
    }
  }
  std::vector<std::string> words;
  for (const auto& bytes : store.multiGet(keys)) {
    words.emplace_back(bytes.begin(), bytes.end());
  }
  return words;
}

// By the words of a rank before and after a while in which it had to write a new one.
std::string where_is(const std::string& before, const std::string& after) {
  const std::string where = after.substr(after.find(' ') + 1);
  if (before != after) {
    return where;
  }
  const int64_t seconds = std::max<int64_t>(0, now() - std::atoll(after.c_str())) / 1000;
  return kNoAnswer + (after.empty() ? "" : c10::str(", last heard of ", seconds, " s ago: ", where));
}

}  // namespace

// ---- what is in the store -------------------------------------------------------------------------------------------

// To a TCPStore it waits for no answer, so that a store that hangs holds nobody up. A FileStore keeps all that was ever
// written: there a rank writes at first, and when somebody has asked.
void Whereabouts::write(const std::string& where) {
  const StorePtr to = store_.lock();
  check_server(to);
  if (as<c10d::FileStore>(to) != nullptr) {
    const int64_t number = to->check({kQuestion}) ? std::stoll(to->get_to_str(kQuestion)) : 0;
    if (std::exchange(answered_, number) == number) {
      return;
    }
  }
  to->set(key_of(rank_), c10::str(now(), " ", where));
}

// First who is missing, then who is elsewhere, last who is where this rank is.
std::string Whereabouts::ask() const {
  const StorePtr from = store_.lock();
  check_server(from);
  from->add(kQuestion, 1);
  const auto deadline = Clock::now() + kPatience;
  const std::vector<std::string> before = words_in(*from, size_);
  std::vector<std::string> after = before;
  while (!std::equal(before.begin(), before.end(), after.begin(), std::not_equal_to<>()) && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::max(kPeriod / 20, milliseconds(size_)));
    after = words_in(*from, size_);
  }
  std::map<std::pair<int, std::string>, std::string> ranks_at;
  const std::string mine = where_is(before[rank_], after[rank_]);
  for (int64_t rank = 0; rank < size_; ++rank) {
    const std::string at = where_is(before[rank], after[rank]);
    std::string& ranks = ranks_at[{at.starts_with(kNoAnswer) ? 0 : at == mine ? 2 : 1, at}];
    ranks += (ranks.empty() ? "rank " : ", ") + name_of(rank);
  }
  std::string text;
  for (const auto& [at, ranks] : ranks_at) {
    text += c10::str(text.empty() ? ". Where the ranks are: " : "; ", ranks, ": ", at.second);
  }
  return text;
}

std::string Whereabouts::name_of(int64_t rank) const {
  const auto global = global_ranks_.empty() ? rank : static_cast<int64_t>(global_ranks_[rank]);
  return std::to_string(rank) + (global == rank ? "" : c10::str(" (global ", global, ")"));
}

// ---- what the process does ------------------------------------------------------------------------------------------

// The engines of this process, and a thread that writes for them. Never destroyed, for the thread may sit in a call of
// a store that hangs. Children that are forked do without: the connections are their parent's.
struct RollCall {
  using Engines = std::vector<std::shared_ptr<Whereabouts>>;

  static RollCall* of_this_process();  // null in a forked child
  void add(const std::shared_ptr<Whereabouts>& engine);
  void write_all();
  static std::string position(const Whereabouts& engine, const Engines& engines);

  const pid_t process_id = getpid();
  std::mutex mutex;  // guards the next two; never held during a call of a store
  std::vector<std::weak_ptr<Whereabouts>> engines;
  bool has_thread = false;
  std::timed_mutex writing;  // held during a call of a store by the thread
};

RollCall* RollCall::of_this_process() {
  static RollCall* const only = [] {
    auto* const made = new RollCall;
    // For good: what stores are made of is torn down next.
    std::atexit([] {
      if (RollCall* const own = of_this_process()) {
        std::ignore = own->writing.try_lock_for(kMoment);
      }
    });
    return made;
  }();
  return only->process_id == getpid() ? only : nullptr;
}

// Before the thread begins, so that the first word is written at once.
void RollCall::add(const std::shared_ptr<Whereabouts>& engine) {
  const std::lock_guard<std::mutex> lock(mutex);
  engines.push_back(engine);
  if (!std::exchange(has_thread, true)) {
    std::thread([this] {
      pthread_setname_np(pthread_self(), kThreadName);
      for (;; std::this_thread::sleep_for(kPeriod)) {
        write_all();
      }
    }).detach();
  }
}

void RollCall::write_all() {
  Engines living;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(engines, [](const auto& engine) { return engine.expired(); });
    for (const auto& engine : engines) {
      living.push_back(engine.lock());
    }
  }
  std::erase(living, nullptr);
  for (const auto& engine : living) {
    const std::string where = position(*engine, living);
    const std::lock_guard<std::timed_mutex> lock(writing);
    try {
      engine->write(where);
    } catch (const std::exception&) {  // the store is gone: whoever asks is told
    }
  }
}

// Where the engines of its group wait, or else those of other groups, or else what they did last.
std::string RollCall::position(const Whereabouts& engine, const Engines& engines) {
  std::string here;
  std::string elsewhere;
  std::string resting;
  for (const auto& each : engines) {
    const std::lock_guard<std::mutex> lock(each->mutex_);
    const bool is_here = each->store_ == engine.store_;
    if (is_here || (each->is_waiting_ && !each->has_failed_)) {
      std::string& text = !is_here ? elsewhere : each->is_waiting_ ? here : resting;
      text += (text.empty() ? "" : " and ") + each->where_;
    }
  }
  return !here.empty() ? here : elsewhere.empty() ? resting : "with another group, " + elsewhere;
}

// ---- what an engine notes -------------------------------------------------------------------------------------------

Whereabouts::Whereabouts(const c10d::ProcessGroup& group, const std::string& engine)
    : of_engine_(" of " + engine),
      rank_(group.getRank()),
      size_(group.getSize()),
      store_(group.getStore()),
      where_("not yet in a sync" + of_engine_) {
  try {
    global_ranks_ = group.getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {  // a backend around another one may not tell
  }
}

std::shared_ptr<Whereabouts> Whereabouts::of(c10d::ProcessGroup& group, const std::string& engine) {
  std::shared_ptr<Whereabouts> whereabouts(new Whereabouts(group, engine));
  if (RollCall* const calls = whereabouts->can_ask() ? RollCall::of_this_process() : nullptr) {
    calls->add(whereabouts);
  }
  return whereabouts;
}

bool Whereabouts::can_ask() const { return size_ > 1 && is_usable(store_.lock()); }

void Whereabouts::wait(const char* what, int64_t step, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
  where_ = what + of_step() + why;
  is_waiting_ = true;
  has_failed_ = false;
}

void Whereabouts::agree(int64_t step, const std::string& why) { wait("agreeing before ", step, ", because " + why); }

void Whereabouts::average(int64_t step) { wait("averaging in ", step, ""); }

void Whereabouts::give_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  where_ = "past " + of_step() + ", in which its backward failed";
  is_waiting_ = true;
}

void Whereabouts::rest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_failed_ && is_waiting_) {
    where_ = "in no sync, after " + of_step();
    is_waiting_ = false;
  }
}

// On a thread of its own, for a store may hang.
std::string Whereabouts::roll_call() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_failed_ = true;
  }
  if (!can_ask() || RollCall::of_this_process() == nullptr) {
    return "";
  }
  const std::lock_guard<std::mutex> lock(asking_);
  if (!told_.empty() && Clock::now() - told_at_ <= kPatience) {  // another bucket has just asked
    return told_;
  }
  told_ = ". Where the other ranks are is not known, for the store of their group does not answer";
  told_ += as<c10d::TCPStore>(store_.lock()) == nullptr
               ? ""
               : ": the process that holds it, the launcher or rank 0's, is stopped or gone";
  try {
    std::packaged_task<std::string()> task([self = shared_from_this()] {
      pthread_setname_np(pthread_self(), kThreadName);
      return self->ask();
    });
    auto told = task.get_future();
    std::thread(std::move(task)).detach();
    if (told.wait_for(kLimit) == std::future_status::ready) {
      told_ = told.get();
    }
  } catch (const std::exception&) {  // of the store's
  }
  told_at_ = Clock::now();
  return told_;
}

}  // namespace fastsync
