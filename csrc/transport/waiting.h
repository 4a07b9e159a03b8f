// Numbers in memory that processes share, which one of them raises and the others wait for.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fastsync {

// Zeros are a valid one. On cache lines of its own, for one process writes it; two, for some CPUs fetch them in pairs.
struct alignas(128) SharedNumber {
  std::atomic<int64_t> value;
  std::atomic<int64_t> woken_at;      // nanoseconds of the host's monotonic clock
  std::atomic<uint32_t> num_changes;  // what others sleep on, for the system takes 32 bits
  std::atomic<uint32_t> num_asleep;

  bool has_reached(int64_t number) const { return value.load(std::memory_order_acquire) >= number; }

  // Does nothing where it has been. What was written before is seen by whoever sees the number.
  void raise_to(int64_t number);
};
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// How many CPUs this process may use at once: those it may run on, and no more than its cgroup's quota. At least 1.
int64_t num_usable_cores();

// Waits for numbers of one kind: at first awake, because others are about to raise them, then asleep. One that came
// late may do so because the core is somebody else's: the next time it sleeps at once.
class Waiting {
 public:
  using Clock = std::chrono::steady_clock;

  // False when the deadline has passed. Calls `look` several times a second, which may throw. Where there are not cores
  // for all, whoever is waited for may need this one.
  bool until(SharedNumber& number, int64_t reached, bool has_cores, Clock::time_point deadline,
             c10::function_ref<void()> look);

 private:
  std::atomic<bool> was_late_ = false;
};

}  // namespace fastsync
