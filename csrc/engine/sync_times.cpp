#include "engine/sync_times.h"

#include <algorithm>
#include <utility>

#include "passes/backend.h"
#include "transport/progress_thread.h"

namespace fastsync {

void Moment::set(c10::Device device) {
  if (device.is_cpu()) {
    time_ = std::chrono::steady_clock::now();
    return;
  }
  if (!event_) {
    event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  }
  event_->record(current_stream(device));
}

double Moment::seconds_to(const Moment& to) const {
  return event_ ? event_->elapsedTime(*to.event_) * 1e-3 : std::chrono::duration<double>(to.time_ - time_).count();
}

void Stopwatch::mark(Mark mark) {
  if (measures_) {
    moments_[static_cast<size_t>(mark)].set(device_);
  }
  if (mark == Mark::kDone) {
    marked_done_ = measures_;
  }
}

// To ask an event anything ends a capture that is under way.
bool Stopwatch::done() const { return marked_done_ && !is_capturing(device_) && at(Mark::kDone).has_passed(); }

void BucketTotals::add(const BucketTotals& other) {
  wire_bytes.add(other.wire_bytes.get());
  num_syncs += other.num_syncs;
  num_timed += other.num_timed;
  pack_time += other.pack_time;
  collective_time += other.collective_time;
  unpack_time += other.unpack_time;
}

void SyncTimes::begin_step() {
  constexpr size_t kMaxSteps = 8;  // how far the host may run ahead of the device before a step goes untimed
  if (!steps_.empty()) {
    end_step();  // its last bucket may have been left out
  }
  collect();
  if (steps_.size() >= kMaxSteps) {
    steps_.pop_front();
  }
  steps_.emplace_back();
  num_steps_ += 1;
}

void SyncTimes::end_step() { steps_.back().ended = true; }

std::shared_ptr<Stopwatch> SyncTimes::start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device) {
  constexpr int64_t kAllUntil = 32;
  constexpr int64_t kOneOf = 16;
  const bool is_timed = device.is_cpu() || num_steps_ <= kAllUntil || num_steps_ % kOneOf == 0;
  auto stopwatch = std::make_shared<Stopwatch>(device, is_timed && !is_capturing(device));
  if (is_timed) {
    steps_.back().laps.push_back({std::move(totals), stopwatch});
  }
  return stopwatch;
}

SyncTotals SyncTimes::totals() {
  collect();
  SyncTotals totals;
  totals.num_timed_steps = num_timed_steps_;
  totals.exposed_time = exposed_time_;
  return totals;
}

void SyncTimes::collect() {
  std::erase_if(steps_, [&](Step& step) {
    const auto is_done = [](const Lap& lap) { return lap.stopwatch->done(); };
    if (!step.ended || !std::all_of(step.laps.begin(), step.laps.end(), is_done)) {
      return false;
    }
    if (!step.laps.empty()) {
      add_up(step);
    }
    return true;
  });
}

void SyncTimes::add_up(const Step& step) {
  double exposed = 0.0;
  for (const Lap& lap : step.laps) {
    const Stopwatch& watch = *lap.stopwatch;
    lap.totals->num_timed += 1;
    lap.totals->pack_time += watch.at(Mark::kStart).seconds_to(watch.at(Mark::kSent));
    lap.totals->collective_time += watch.at(Mark::kSent).seconds_to(watch.at(Mark::kReduced));
    lap.totals->unpack_time += watch.at(Mark::kReduced).seconds_to(watch.at(Mark::kDone));
    const Stopwatch& last = *step.laps.back().stopwatch;
    if (last.device() == watch.device()) {
      exposed = std::max(exposed, last.at(Mark::kSent).seconds_to(watch.at(Mark::kDone)));
    }
  }
  num_timed_steps_ += 1;
  exposed_time_ += exposed;
}

}  // namespace fastsync
