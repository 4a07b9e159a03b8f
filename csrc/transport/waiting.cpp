#include "transport/waiting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>

namespace fastsync {

namespace {

using Clock = Waiting::Clock;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr microseconds kAwake(150);  // how long a wait stays awake
constexpr milliseconds kLookEvery(100);

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

// Waits awake. If there is a core for each rank, this rank keeps its core: another process that got it would keep it
// for milliseconds.
bool is_reached_awake(const SharedNumber& number, int64_t reached, bool has_cores, Clock::time_point deadline) {
  while (!number.has_reached(reached)) {
    if (Clock::now() > deadline) {
      return false;
    }
    if (!has_cores) {
      sched_yield();
    }
  }
  return true;
}

// Returns how many CPUs' time the control groups (cgroups, version 2) of this process allow, rounded up, and at most
// `cores`. The groups around its own count too. In a container, folders of the process's path may be missing, and do
// not count.
int64_t cores_of_cgroups(int64_t cores) {
  std::ifstream groups("/proc/self/cgroup");
  std::string path;
  while (std::getline(groups, path) && !path.starts_with("0::")) {
  }
  path = path.starts_with("0::/") ? path.substr(3) : "";
  for (;; path.resize(path.rfind('/'))) {
    int64_t quota = 0;
    int64_t period = 0;
    if (std::ifstream("/sys/fs/cgroup" + path + "/cpu.max") >> quota >> period && period > 0) {
      cores = std::min(cores, (quota + period - 1) / period);
    }
    if (path.empty()) {
      return cores;
    }
  }
}

}  // namespace

// A process that falls asleep counts itself, reads the number of changes, and then looks at the value. This process
// stores the value, counts a change, and then looks who sleeps. So at least one of the two sees what the other did.
void SharedNumber::raise_to(int64_t number) {
  if (has_reached(number)) {
    return;
  }
  value.store(number, std::memory_order_seq_cst);
  wake();
}

void SharedNumber::raise_by_one() {
  value.fetch_add(1, std::memory_order_seq_cst);
  wake();
}

void SharedNumber::wake() {
  num_changes.fetch_add(1, std::memory_order_seq_cst);
  if (num_asleep.load(std::memory_order_seq_cst) > 0) {
    woken_at.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    futex(num_changes, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

int64_t num_usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool is_known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  const int64_t cores = is_known ? CPU_COUNT(&allowed) : std::thread::hardware_concurrency();
  return std::max<int64_t>(1, cores_of_cgroups(cores));
}

bool Waiting::until(SharedNumber& number, int64_t reached, bool has_cores, Clock::time_point deadline,
                    c10::function_ref<void()> look) {
  if (number.has_reached(reached)) {
    was_late_ = false;
    return true;
  }
  const auto began = Clock::now();
  auto now = began;
  if (!was_late_ && is_reached_awake(number, reached, has_cores, began + kAwake)) {
    return true;
  }
  while (!number.has_reached(reached) && now < deadline) {
    number.num_asleep.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = number.num_changes.load(std::memory_order_seq_cst);
    if (number.value.load(std::memory_order_seq_cst) < reached) {
      const timespec pause{0, std::chrono::nanoseconds(kLookEvery).count()};
      futex(number.num_changes, FUTEX_WAIT, seen, &pause);
    }
    number.num_asleep.fetch_sub(1, std::memory_order_seq_cst);
    now = Clock::now();
    if (!number.has_reached(reached) && now - began >= kLookEvery) {
      look();
    }
  }
  // The time that waking up took does not count, because it may be longer than the other process was late.
  const Clock::time_point woken{Clock::duration(number.woken_at.load(std::memory_order_relaxed))};
  was_late_ = woken - began > kAwake;
  return number.has_reached(reached);
}

}  // namespace fastsync
