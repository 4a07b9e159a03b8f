// SyncTimes measures how long the parts of a sync take, on the clock of the device that does them. The host never waits
// for the device.
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

// The totals of one bucket: counts and times, added up over its syncs. The times are in seconds. They are those of
// num_timed syncs, which the device had done in time to be read.
struct BucketTotals {
  int64_t numel = 0;           // how many values the bucket's gradients have
  bool is_sparse = false;      // whether it holds a sparse gradient, of which numel counts this rank's values
  std::string kernels;         // see kernels_on
  bool shares_memory = false;  // whether ranks of a host share memory in the newest sync
  int64_t num_hosts = 1;       // how many hosts there are, if ranks share memory; else 1
  std::string why_not_shared;  // why ranks cannot share memory; empty if no rank has tried in vain
  Count wire_bytes;            // the thread that receives adds to it
  int64_t num_syncs = 0;
  int64_t num_timed = 0;
  double pack_time = 0.0;
  double collective_time = 0.0;
  double unpack_time = 0.0;

  // Adds the other's counts and times, from wire_bytes on. The members before them belong to one bucket.
  void add(const BucketTotals& other);
};

// The costs of all syncs of a model.
struct SyncTotals {
  std::vector<BucketTotals> buckets;  // the newest step's buckets, in the order in which they were sent
  BucketTotals all;                   // the totals of all buckets, with those that are forgotten
  int64_t num_steps = 0;
  int64_t num_timed_steps = 0;
  // The time of sums that backward did not hide, in seconds, over the timed steps. In a step it begins when the last
  // bucket was on its way, and ends when all buckets were unpacked.
  double exposed_time = 0.0;
};

// The moments of a bucket's sync: before it is packed, when it is sent, when its sum has come, and when it is unpacked.
enum class Mark : int8_t { kStart, kSent, kReduced, kDone };

// A stopwatch notes the moments of one bucket's sync, on the device's own clock. On a CPU they are times, elsewhere
// events on a stream.
class Stopwatch {
 public:
  Stopwatch(std::shared_ptr<BucketTotals> totals, c10::Device device, bool measures)
      : totals_(std::move(totals)), device_(device), measures_(measures) {}

  void mark(Mark mark);
  // Whether the device has passed kDone. It is false if the stopwatch does not measure, and while a CUDA graph is
  // captured. For a captured sync it stays false, because the events belong to the graph.
  bool done() const;

  // The next two are for a stopwatch that is done.

  // Adds the times to the totals.
  void add_up() const;
  // The seconds from the moment that the last bucket of the step was on its way until this bucket was done.
  double seconds_after(const Stopwatch& last) const;

 private:
  struct Moment {
    std::chrono::steady_clock::time_point time;
    std::optional<c10::Event> event;  // set instead of the time on a device other than a CPU
  };

  const Moment& at(Mark mark) const { return moments_[static_cast<size_t>(mark)]; }
  static double seconds(const Moment& from, const Moment& to);

  const std::shared_ptr<BucketTotals> totals_;
  const c10::Device device_;
  const bool measures_;
  std::atomic<bool> marked_done_{false};
  std::array<Moment, 4> moments_;  // by mark
};

// Holds the stopwatches of steps under way, and the totals of steps that are over. Not thread-safe. On a device other
// than a CPU an event costs a launch: there only the first steps are timed, and then one of several.
class SyncTimes {
 public:
  // Buckets belong to a step if they start between begin_step and end_step. Without end_step, the next begin_step ends
  // the step. A step is added up once it has ended.
  void begin_step();
  void end_step();
  // Makes a stopwatch for the next bucket of this step. Its times will go to the totals.
  std::shared_ptr<Stopwatch> start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device);
  // Adds up the steps that the device has done.
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
