// How long the parts of a sync took, on the clock of the device that did them. The host never waits for it.
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
#include <utility>
#include <vector>

namespace fastsync {

// A number that one thread adds to while another one reads it.
struct Count : std::atomic<int64_t> {
  Count() : atomic(0) {}
  Count(const Count& other) : atomic(other.load()) {}
  Count& operator=(const Count& other) {
    store(other.load());
    return *this;
  }
};

// Sums over the syncs of one bucket. The times, in seconds, are over num_timed syncs: those that the device was done
// with in time to be read.
struct BucketTotals {
  int64_t elements = 0;
  std::string kernels;         // see kernels_on
  bool shares_memory = false;  // in the newest sync, as the next two
  int64_t num_hosts = 1;       // of the ranks that share memory
  std::string why_not_shared;  // if that was tried
  Count wire_bytes;            // added by the thread that receives
  int64_t num_syncs = 0;
  int64_t num_timed = 0;
  double pack_time = 0.0;
  double collective_time = 0.0;
  double unpack_time = 0.0;

  void add(const BucketTotals& other);  // the counts and times; what is before them is one bucket's
};

// The costs of all syncs of a model.
struct SyncTotals {
  std::vector<BucketTotals> buckets;  // of the newest step, in the order they were sent
  BucketTotals all;                   // of all the buckets there have been
  int64_t num_steps = 0;
  int64_t num_timed_steps = 0;
  // What backward did not hide, over the timed steps: seconds from the moment that the last bucket of a step was on its
  // way until all were unpacked.
  double exposed_time = 0.0;
};

enum class Mark : int8_t { kStart, kSent, kReduced, kDone };

// The moments of one bucket's sync, on the device's own clock: on a CPU the host's time, elsewhere events on a stream.
class Stopwatch {
 public:
  Stopwatch(std::shared_ptr<BucketTotals> totals, c10::Device device, bool measures)
      : totals_(std::move(totals)), device_(device), measures_(measures) {}

  void mark(Mark mark);
  // Whether the device has passed kDone. Never true of a stopwatch that does not measure, nor while a CUDA graph is
  // captured, nor of a captured sync: its events belong to the graph.
  bool done() const;
  // The rest is for a stopwatch that is done.
  void add_up() const;  // to the totals
  // How long the last bucket of the step had been on its way when this one was done.
  double seconds_after(const Stopwatch& last) const;

 private:
  struct Moment {
    std::chrono::steady_clock::time_point time;
    std::optional<c10::Event> event;  // set in place of the time
  };

  const Moment& at(Mark mark) const { return moments_[static_cast<size_t>(mark)]; }
  static double seconds(const Moment& from, const Moment& to);

  const std::shared_ptr<BucketTotals> totals_;
  const c10::Device device_;
  const bool measures_;
  std::atomic<bool> marked_done_{false};
  std::array<Moment, 4> moments_;  // by mark
};

// The stopwatches of the steps under way, and the totals of those that are over. Not thread-safe. On a device other
// than a CPU the clock costs launches: there the first steps are timed, and then one of several.
class SyncTimes {
 public:
  // A step is the buckets between begin_step and end_step, or the next begin_step. It is added up once it has ended.
  void begin_step();
  void end_step();
  // A stopwatch for the next bucket of this step, whose times will go to the totals given.
  std::shared_ptr<Stopwatch> start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device);
  // Adds up the steps that the device is done with.
  void collect();
  int64_t num_steps() const { return num_steps_; }
  // The number of steps that are added up, and their exposed time.
  std::pair<int64_t, double> exposed() const { return {num_timed_steps_, exposed_time_}; }

 private:
  struct Step {
    std::vector<std::shared_ptr<Stopwatch>> buckets;
    bool ended = false;
  };

  std::deque<Step> steps_;
  int64_t num_steps_ = 0;
  int64_t num_timed_steps_ = 0;
  double exposed_time_ = 0.0;
};

}  // namespace fastsync
