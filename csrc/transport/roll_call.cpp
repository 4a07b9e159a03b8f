#include "transport/roll_call.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <optional>
#include <thread>
#include <vector>

#include "transport/roll_call_store.h"

namespace fastsync {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPeriod(1000);    // between looks at the store, while nobody asks here
constexpr milliseconds kPause(50);       // while somebody does; more where there are many ranks
constexpr milliseconds kPatience(3000);  // with ranks that do not answer
constexpr milliseconds kLimit(4000);     // for the store, which may hang

}  // namespace

// This process as one rank of a group.
struct Whereabouts::Seat {
  explicit Seat(const c10d::ProcessGroup& group) : group(&group), store(group) {}

  const c10d::ProcessGroup* const group;  // to be compared only
  const pid_t process_id = getpid();
  RollCallStore store;                        // this and the next two: the thread's alone
  std::optional<Clock::time_point> deadline;  // for answers to this rank's question
  bool has_left_word = false;                 // for those who ask when it is gone

  std::mutex asking;  // held by who asks; guards the next two
  std::string newest_told;
  Clock::time_point told_at;
  bool is_asking = false;           // this and the rest: guarded by RollCall's mutex
  std::optional<std::string> told;  // the answers
  bool is_lost = false;             // the store is gone
};

// One for a process, never destroyed: its thread may sit in a call of a store that hangs. A child that was forked gets
// one of its own.
struct RollCall {
  using Seat = Whereabouts::Seat;

  static RollCall& instance();

  void add(const std::shared_ptr<Whereabouts>& engine, c10d::ProcessGroup& group);
  std::string ask(Seat& seat);

  void run();
  milliseconds visit_all(std::unique_lock<std::mutex>& lock);
  void visit(Seat& seat, bool is_left);
  std::string position(const Seat& seat);
  bool has_engines(const Seat& seat) const;
  void stop();

  static std::atomic<RollCall*> newest;
  const pid_t process_id = getpid();
  std::mutex mutex;  // guards what follows; never held during a call of a store
  std::condition_variable changed;
  std::vector<std::shared_ptr<Seat>> seats;
  std::vector<std::weak_ptr<Whereabouts>> engines;
  bool has_thread = false;
  bool has_news = false;
  bool is_stopping = false;
  bool has_ended = false;
};

// ---- what an engine notes -------------------------------------------------------------------------------------------

std::shared_ptr<Whereabouts> Whereabouts::of(c10d::ProcessGroup& group, std::string engine) {
  std::shared_ptr<Whereabouts> whereabouts(new Whereabouts(std::move(engine)));
  if (group.getSize() > 1 && RollCallStore::is_usable(group.getStore())) {
    RollCall::instance().add(whereabouts, group);
  }
  return whereabouts;
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
  if (!seat_ || seat_->process_id != getpid()) {
    return "";
  }
  const std::lock_guard<std::mutex> lock(seat_->asking);
  if (seat_->newest_told.empty() || Clock::now() - seat_->told_at > kPatience) {  // else another bucket has just asked
    seat_->newest_told = RollCall::instance().ask(*seat_);
    seat_->told_at = Clock::now();
  }
  return seat_->newest_told;
}

// ---- what the process does ------------------------------------------------------------------------------------------

std::atomic<RollCall*> RollCall::newest = nullptr;

RollCall& RollCall::instance() {
  RollCall* found = newest;
  if (found != nullptr && found->process_id == getpid()) {
    return *found;
  }
  auto* const made = new RollCall;
  if (!newest.compare_exchange_strong(found, made)) {
    delete made;
    return *newest;
  }
  // Once what stores are made of is torn down, the thread must call none.
  std::atexit([] {
    if (RollCall& roll_call = *newest; roll_call.process_id == getpid()) {
      roll_call.stop();
    }
  });
  return *made;
}

void RollCall::stop() {
  constexpr milliseconds kEnough(200);
  std::unique_lock<std::mutex> lock(mutex);
  is_stopping = has_news = true;
  changed.notify_all();
  changed.wait_for(lock, kEnough, [&] { return has_ended || !has_thread; });
}

void RollCall::add(const std::shared_ptr<Whereabouts>& engine, c10d::ProcessGroup& group) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& each : engines) {
    if (const auto other = each.lock(); other && other->seat_->group == &group) {
      engine->seat_ = other->seat_;
    }
  }
  if (!engine->seat_) {
    engine->seat_ = seats.emplace_back(std::make_shared<Seat>(group));
  }
  std::erase_if(engines, [](const auto& each) { return each.expired(); });
  engines.push_back(engine);
  if (!std::exchange(has_thread, true)) {
    std::thread([this] {
      pthread_setname_np(pthread_self(), "fastsync calls");
      run();
    }).detach();
  }
  has_news = true;
  changed.notify_all();
}

std::string RollCall::ask(Seat& seat) {
  std::unique_lock<std::mutex> lock(mutex);
  seat.is_asking = true;
  seat.told.reset();
  has_news = true;
  changed.notify_all();
  changed.wait_for(lock, kLimit, [&] { return seat.told || seat.is_lost; });
  seat.is_asking = false;
  return seat.told.value_or(seat.store.why_none());
}

bool RollCall::has_engines(const Seat& seat) const {
  return std::any_of(engines.begin(), engines.end(), [&](const auto& each) {
    const auto engine = each.lock();
    return engine && engine->seat_.get() == &seat;
  });
}

// What this rank answers: where its engines of the group wait, or else those of other groups.
std::string RollCall::position(const Seat& seat) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::string here;
  std::string elsewhere;
  std::vector<std::string> resting;
  for (const auto& each : engines) {
    const auto engine = each.lock();
    const bool is_here = engine && engine->seat_.get() == &seat;
    if (is_here && engine->is_resting()) {
      resting.push_back(engine->text());
    } else if (engine && !engine->is_resting() && (is_here || !engine->has_failed_)) {
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
  return resting.size() == 1 ? resting.front() : resting.empty() ? "has let go of its engines" : "in no sync";
}

void RollCall::visit(Seat& seat, bool is_left) {
  seat.store.connect();
  std::unique_lock<std::mutex> lock(mutex);
  const bool is_asking = seat.is_asking && !seat.told;
  lock.unlock();
  if (!is_asking) {
    seat.deadline.reset();  // of one that gave up
  }
  if (is_asking && !seat.deadline) {
    seat.store.ask();
    seat.deadline = Clock::now() + kPatience;
  }
  while (seat.store.is_asked()) {
    seat.store.answer(position(seat));
  }
  const bool is_over = is_asking && (seat.store.have_all_answered() || Clock::now() >= *seat.deadline);
  if (is_over || (is_left && !seat.has_left_word)) {
    seat.store.leave(position(seat));
    seat.has_left_word = true;
  }
  if (is_over) {
    seat.deadline.reset();
    const std::string told = seat.store.answers();
    lock.lock();
    seat.told = told;
  }
}

// Returns how long to pause.
milliseconds RollCall::visit_all(std::unique_lock<std::mutex>& lock) {
  milliseconds pause = kPeriod;
  for (const auto& seat : std::vector(seats)) {
    if (is_stopping) {
      break;
    }
    const bool is_left = !has_engines(*seat);
    bool is_lost = false;
    lock.unlock();
    try {
      visit(*seat, is_left);
    } catch (const std::exception&) {
      is_lost = true;
    }
    if (is_lost || is_left) {
      seat->store.disconnect();
    }
    lock.lock();
    seat->is_lost = is_lost;
    if (is_lost || is_left) {
      std::erase(seats, seat);
    }
    if (seat->is_asking && !seat->told) {
      pause = std::min(pause, std::max(kPause, milliseconds(seat->store.size())));
    }
  }
  return pause;
}

void RollCall::run() {
  std::unique_lock<std::mutex> lock(mutex);
  while (!is_stopping) {
    const milliseconds pause = visit_all(lock);
    changed.notify_all();
    changed.wait_for(lock, pause, [&] { return std::exchange(has_news, false); });
  }
  for (const auto& seat : seats) {
    seat->store.disconnect();
  }
  has_ended = true;
  changed.notify_all();
}

}  // namespace fastsync
