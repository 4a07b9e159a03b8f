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
#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <tuple>
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

template <class Kind>
const Kind* as(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<const Kind*>(prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get());
}

// One that a thread may use that never has the GIL: a store may also be Python's.
bool is_usable(const StorePtr& store) {
  return store && (as<c10d::TCPStore>(store) != nullptr || as<c10d::FileStore>(store) != nullptr ||
                   as<c10d::HashStore>(store) != nullptr);
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
  TORCH_CHECK(store, "the store is gone");
  if (const auto* const tcp = as<c10d::TCPStore>(store)) {
    thread_local int newest = -1;
    bool is_there = is_connected(newest, tcp->getPort());
    for (auto each = std::filesystem::directory_iterator("/proc/self/fd"); !is_there && each != end(each); ++each) {
      newest = std::stoi(each->path().filename());
      is_there = is_connected(newest, tcp->getPort());
    }
    TORCH_CHECK(is_there, "the store is gone");
  }
}

std::vector<uint64_t> global_ranks_of(const c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {
    return {};
  }
}

std::string key_of(int64_t rank) { return c10::str(kQuestion, "/", rank); }

int64_t now() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// What a rank writes: when, by its own clock, and where it stands.
std::string word_of(const std::string& where) { return c10::str(now(), " ", where); }

// By the words of a rank before and after a while in which it had to write a new one.
std::string where_is(const std::string& before, const std::string& after) {
  const std::string where = after.substr(after.find(' ') + 1);
  if (before != after) {
    return where;
  }
  std::string text = "no answer, so it is stopped or gone, or has no engine of this group";
  if (!after.empty()) {
    const int64_t seconds = std::max<int64_t>(0, now() - std::atoll(after.c_str())) / 1000;
    text += c10::str(", last heard of ", seconds, " s ago: ", where);
  }
  return text;
}

std::string why_none(bool has_server) {
  const char* const of_agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const char* const holder = of_agent != nullptr && std::string(of_agent) == "True"
                                 ? ": the launcher, which holds it, is stopped or gone"
                                 : ": the process that holds it, as a rule rank 0's, is stopped or gone";
  return c10::str(". Where the other ranks are is not known, for the store of their group does not answer",
                  has_server ? holder : "");
}

constexpr const char* kThreadName = "fastsync calls";

}  // namespace

// This process as one rank of a group.
struct Whereabouts::Place : std::enable_shared_from_this<Place> {
  explicit Place(const c10d::ProcessGroup& of)
      : group(&of), rank(of.getRank()), size(of.getSize()), global_ranks(global_ranks_of(of)), store(of.getStore()) {}

  void write(const std::string& where);
  std::vector<std::string> read(c10d::Store& from) const;
  std::string roll_call() const;
  std::string roll_call_in_time();
  std::string names(const std::vector<int64_t>& ranks) const;

  const c10d::ProcessGroup* const group;  // to be compared only
  const int64_t rank;
  const int64_t size;
  const std::vector<uint64_t> global_ranks;          // empty where they are the same, or not known
  const c10::weak_intrusive_ptr<c10d::Store> store;  // the group's, which may have a server that has to end with it
  std::optional<std::string> answered;               // the newest question
};

// ---- what is in the store -------------------------------------------------------------------------------------------

// A FileStore keeps all that was ever written. There a rank writes at first, and when somebody asks.
void Whereabouts::Place::write(const std::string& where) {
  const StorePtr to = store.lock();
  check_server(to);
  if (as<c10d::FileStore>(to) != nullptr) {
    const std::string question = to->check({kQuestion}) ? to->get_to_str(kQuestion) : "";
    if (std::exchange(answered, question) == question) {
      return;
    }
  }
  to->set(key_of(rank), word_of(where));
}

// The words of all ranks. multiGet waits for those that are not there, so they become empty ones.
std::vector<std::string> Whereabouts::Place::read(c10d::Store& from) const {
  std::vector<std::string> keys;
  for (int64_t each = 0; each < size; ++each) {
    keys.push_back(key_of(each));
  }
  if (!from.check(keys)) {
    for (const std::string& key : keys) {
      from.compareSet(key, std::string(), std::string());
    }
  }
  std::vector<std::string> words;
  for (const auto& bytes : from.multiGet(keys)) {
    words.emplace_back(bytes.begin(), bytes.end());
  }
  return words;
}

// First who is missing, then who is elsewhere, last who is where this rank is.
std::string Whereabouts::Place::roll_call() const {
  const StorePtr from = store.lock();
  check_server(from);
  from->set(kQuestion, word_of(std::to_string(rank)));
  const auto deadline = Clock::now() + kPatience;
  const std::vector<std::string> before = read(*from);
  std::vector<std::string> after = before;
  while (!std::equal(before.begin(), before.end(), after.begin(), std::not_equal_to<>()) && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::max(kPeriod / 20, milliseconds(size)));
    after = read(*from);
  }
  std::map<std::pair<int, std::string>, std::vector<int64_t>> ranks_at;
  const std::string mine = where_is(before[rank], after[rank]);
  for (int64_t each = 0; each < size; ++each) {
    const std::string where = where_is(before[each], after[each]);
    ranks_at[{where.starts_with("no answer") ? 0 : where == mine ? 2 : 1, where}].push_back(each);
  }
  std::string text;
  for (const auto& [at, ranks] : ranks_at) {
    text += (text.empty() ? ". Where the ranks are: " : "; ") + names(ranks) + ": " + at.second;
  }
  return text;
}

// On a thread of its own, for a store may hang.
std::string Whereabouts::Place::roll_call_in_time() {
  try {
    std::packaged_task<std::string()> task([place = shared_from_this()] {
      pthread_setname_np(pthread_self(), kThreadName);
      return place->roll_call();
    });
    auto told = task.get_future();
    std::thread(std::move(task)).detach();
    if (told.wait_for(kLimit) == std::future_status::ready) {
      return told.get();
    }
  } catch (const std::exception&) {  // of the store's
  }
  return why_none(as<c10d::TCPStore>(store.lock()) != nullptr);
}

// "rank 0, 2 (global 4, 6)"
std::string Whereabouts::Place::names(const std::vector<int64_t>& ranks) const {
  std::string names;
  std::string global;
  bool differ = false;
  for (const int64_t each : ranks) {
    const auto of_rank = global_ranks.empty() ? each : static_cast<int64_t>(global_ranks[each]);
    differ |= of_rank != each;
    names += (names.empty() ? "rank " : ", ") + std::to_string(each);
    global += (global.empty() ? "" : ", ") + std::to_string(of_rank);
  }
  return differ ? names + " (global " + global + ")" : names;
}

// ---- what the process does ------------------------------------------------------------------------------------------

// The engines of this process, and a thread that writes where they stand. Never destroyed, for the thread may sit in a
// call of a store that hangs. Children that are forked do without: the connections are their parent's.
struct RollCall {
  static RollCall& instance();
  bool is_own() const { return process_id == getpid(); }

  void add(Whereabouts& engine, c10d::ProcessGroup& group);
  void remove(Whereabouts& engine);
  void write_all();
  std::string position(const Whereabouts::Place& place) const;

  const pid_t process_id = getpid();
  std::mutex mutex;  // guards the next; never held during a call of a store
  std::vector<Whereabouts*> engines;
  std::timed_mutex writing;  // held during a call of a store by the thread
};

RollCall& RollCall::instance() {
  static RollCall* const only = [] {
    auto* const made = new RollCall;
    std::thread([made] {
      pthread_setname_np(pthread_self(), kThreadName);
      for (;; std::this_thread::sleep_for(kPeriod)) {
        made->write_all();
      }
    }).detach();
    // For good: what stores are made of is torn down next.
    std::atexit([] {
      if (instance().is_own()) {
        std::ignore = instance().writing.try_lock_for(kMoment);
      }
    });
    return made;
  }();
  return *only;
}

void RollCall::add(Whereabouts& engine, c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto other = std::find_if(engines.begin(), engines.end(),
                                  [&](const Whereabouts* each) { return each->place_->group == &group; });
  engine.place_ = other == engines.end() ? std::make_shared<Whereabouts::Place>(group) : (*other)->place_;
  engines.push_back(&engine);
}

void RollCall::remove(Whereabouts& engine) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase(engines, &engine);
}

void RollCall::write_all() {
  std::map<std::shared_ptr<Whereabouts::Place>, std::string> words;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const Whereabouts* engine : engines) {
      words[engine->place_] = position(*engine->place_);
    }
  }
  for (const auto& [place, where] : words) {
    const std::lock_guard<std::timed_mutex> lock(writing);
    try {
      place->write(where);
    } catch (const std::exception&) {  // the store is gone: whoever asks is told
    }
  }
}

// What others are told: where the engines of the group wait, or else those of other groups.
std::string RollCall::position(const Whereabouts::Place& place) const {
  std::string here;
  std::string elsewhere;
  std::vector<std::string> resting;
  for (const Whereabouts* engine : engines) {
    const bool is_here = engine->place_.get() == &place;
    if (is_here && engine->is_resting()) {
      resting.push_back(engine->text());
    } else if (!engine->is_resting() && (is_here || !engine->has_failed_)) {
      std::string& text = is_here ? here : elsewhere;
      text += (text.empty() ? "" : " and ") + engine->text();
    }
  }
  if (!here.empty()) {
    return here;
  }
  if (!elsewhere.empty()) {
    return "with another group, " + elsewhere;
  }
  return resting.size() == 1 ? resting.front() : "in no sync";
}

// ---- what an engine notes -------------------------------------------------------------------------------------------

std::shared_ptr<Whereabouts> Whereabouts::of(c10d::ProcessGroup& group, std::string engine) {
  std::shared_ptr<Whereabouts> whereabouts(new Whereabouts(std::move(engine)));
  if (group.getSize() > 1 && is_usable(group.getStore()) && RollCall::instance().is_own()) {
    RollCall::instance().add(*whereabouts, group);
  }
  return whereabouts;
}

Whereabouts::~Whereabouts() {
  if (place_ && RollCall::instance().is_own()) {
    RollCall::instance().remove(*this);
  }
}

void Whereabouts::enter(Phase phase, int64_t step) {
  step_.store(step, std::memory_order_relaxed);
  has_failed_.store(false, std::memory_order_relaxed);
  phase_.store(phase, std::memory_order_relaxed);
}

void Whereabouts::agree(int64_t step, std::string why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  why_ = std::move(why);
  enter(Phase::kAgreeing, step);
}

void Whereabouts::average(int64_t step) { enter(Phase::kAveraging, step); }

void Whereabouts::give_up() { phase_.store(Phase::kGivenUp, std::memory_order_relaxed); }

void Whereabouts::rest() {
  if (!has_failed_.load(std::memory_order_relaxed)) {
    phase_.store(Phase::kResting, std::memory_order_relaxed);
  }
}

std::string Whereabouts::text() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t step = step_;
  const std::string of_step = c10::str("step ", step, " of ", engine_);
  switch (phase_.load()) {
    case Phase::kAveraging:
      return "averaging in " + of_step;
    case Phase::kGivenUp:
      return "past " + of_step + ", in which its backward failed";
    case Phase::kAgreeing:
      return "agreeing before " + of_step + ", because " + why_;
    case Phase::kResting:
      break;
  }
  return step < 0 ? "not yet in a sync of " + engine_ : "in no sync, after " + of_step;
}

std::string Whereabouts::roll_call() {
  has_failed_ = true;
  if (!place_ || !RollCall::instance().is_own()) {
    return "";
  }
  const std::lock_guard<std::mutex> lock(asking_);
  if (told_.empty() || Clock::now() - told_at_ > kPatience) {  // else another bucket has just asked
    told_ = place_->roll_call_in_time();
    told_at_ = Clock::now();
  }
  return told_;
}

}  // namespace fastsync
