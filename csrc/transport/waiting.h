// Numbers in shared memory. One process raises a number, and others wait until it has reached a value.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fastsync {

// Memory of zeros is a valid number. A number has cache lines of its own, because one process writes it and others read
// it. It has two, because some CPUs fetch cache lines in pairs.
struct alignas(128) SharedNumber {
  std::atomic<int64_t> value;
  std::atomic<int64_t> woken_at;      // when processes were last woken, in nanoseconds of the host's monotonic clock
  std::atomic<uint32_t> num_changes;  // how often the value has changed; processes sleep on its 32 bits, as on a futex
  std::atomic<uint32_t> num_asleep;   // how many processes sleep

  bool has_reached(int64_t number) const { return value.load(std::memory_order_acquire) >= number; }

  // Does nothing if the value has reached the number. A process that sees the number also sees what was written before.
  void raise_to(int64_t number);
  // Raises the value by one. Several processes may do that.
  void raise_by_one();

 private:
  void wake();
};
static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// How many CPUs this process may use at once, by its affinity and by its cgroup's quota. At least 1.
int64_t num_usable_cores();

// Waits for numbers of one kind. A wait is awake at first, because others are about to raise the number, and then
// sleeps. If a number came late, the other process may need this core, so the next wait sleeps at once.
class Waiting {
 public:
  using Clock = std::chrono::steady_clock;

  // Waits until the number has reached a value. Returns false if the deadline passes first. While it sleeps, it calls
  // `look` several times a second, which may throw. If there is no core for each process, others run while it is awake.
  bool until(SharedNumber& number, int64_t reached, bool has_cores, Clock::time_point deadline,
             c10::function_ref<void()> look);

 private:
  std::atomic<bool> was_late_ = false;
};

}  // namespace fastsync
