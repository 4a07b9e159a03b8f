// How long the parts of a sync took, on the clock of the device that did them, without the host ever waiting for it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fastsync {

enum class Mark : int8_t { kStart, kSent, kReduced, kDone };

// A moment on the device's own clock: on a CPU the host's, elsewhere a place on the current stream.
class Moment {
 public:
  void set(c10::Device device);
  bool has_passed() const { return !event_ || event_->query(); }
  // From this one, of the same device, both of which have passed.
  double seconds_to(const Moment& to) const;

 private:
  std::chrono::steady_clock::time_point time_;
  std::optional<c10::Event> event_;  // takes the place of the time where there is one
};

// The moments of one bucket's sync.
class Stopwatch {
 public:
  Stopwatch(c10::Device device, bool measures) : device_(device), measures_(measures) {}

  void mark(Mark mark);
  // True once the device has passed kDone. Never of one that does not measure, nor while a CUDA graph is captured, nor
  // of what was: its events belong to the graph.
  bool done() const;

  const Moment& at(Mark mark) const { return moments_[static_cast<size_t>(mark)]; }
  c10::Device device() const { return device_; }

 private:
  c10::Device device_;
  bool measures_;
  std::atomic<bool> marked_done_{false};
  std::array<Moment, 4> moments_;  // by mark
};

// Some thread adds to it while another one reads.
class Count {
 public:
  Count() = default;
  Count(const Count& other) : value_(other.get()) {}
  Count& operator=(const Count& other) {
    value_ = other.get();
    return *this;
  }
  int64_t get() const { return value_.load(std::memory_order_relaxed); }
  void add(int64_t more) { value_.fetch_add(more, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_ = 0;
};

// Sums over the syncs of one bucket. The times, in seconds, are over num_timed of them: those of which the device was
// done in time to be read.
struct BucketTotals {
  int64_t elements = 0;
  std::string kernels;         // see kernels_on
  bool shares_memory = false;  // this and the next two: in the newest sync
  int64_t num_hosts = 1;       // if it does, of the ranks
  std::string why_not_shared;  // where that was tried
  Count wire_bytes;            // by whoever receives
  int64_t num_syncs = 0;
  int64_t num_timed = 0;
  double pack_time = 0.0;
  double collective_time = 0.0;
  double unpack_time = 0.0;

  void add(const BucketTotals& other);  // all but the first six, which are one bucket's
};

// What the syncs of a model have cost.
struct SyncTotals {
  std::vector<BucketTotals> buckets;  // of the newest step, in the order they were sent
  BucketTotals all;                   // of all the buckets there have been
  int64_t num_steps = 0;
  int64_t num_timed_steps = 0;
  // Seconds from the moment the last bucket of a step was on its way until all were unpacked: what backward did not
  // hide. Over the timed steps.
  double exposed_time = 0.0;
};

// The stopwatches of the steps under way, and the totals of those that are over. Not thread-safe. Of a device other
// than a CPU, whose clock costs launches, the first steps are timed and then one of several.
class SyncTimes {
 public:
  // A step is the buckets between begin_step and end_step, or the next begin_step. It is added up once it has ended.
  void begin_step();
  void end_step();
  // A stopwatch for the next bucket of this step, whose times will go to the totals given.
  std::shared_ptr<Stopwatch> start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device);
  // Adds up the steps that the device is done with.
  void collect();
  // The times alone, of the steps that the device is done with: the buckets' totals are added up by now, too.
  SyncTotals totals();

 private:
  struct Lap {
    std::shared_ptr<BucketTotals> totals;
    std::shared_ptr<Stopwatch> stopwatch;
  };
  struct Step {
    std::vector<Lap> laps;
    bool ended = false;
  };

  void add_up(const Step& step);

  std::deque<Step> steps_;
  int64_t num_steps_ = 0;
  int64_t num_timed_steps_ = 0;
  double exposed_time_ = 0.0;
};

}  // namespace fastsync
