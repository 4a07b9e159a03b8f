#include "engine/sync_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "passes/backend.h"

namespace fastsync {

Stopwatch::Stopwatch(c10::Device device, bool measures) : device_(device), measures_(measures) {
  if (!device.is_cpu() && measures) {
    for (auto& event : events_) {
      event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    }
  }
}

void Stopwatch::restart() {
  marked_done_ = false;
  measures_ = !is_capturing(device_);
}

void Stopwatch::mark(Mark mark) {
  const auto index = static_cast<size_t>(mark);
  if (device_.is_cpu()) {
    times_[index] = std::chrono::steady_clock::now();
  } else if (measures_) {
    events_[index]->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  if (mark == Mark::kDone) {
    marked_done_ = measures_;
  }
}

bool Stopwatch::done() const {
  if (!marked_done_ || device_.is_cpu()) {
    return marked_done_;
  }
  // To ask an event anything ends a capture that is under way.
  return !is_capturing(device_) && events_[static_cast<size_t>(Mark::kDone)]->query();
}

double Stopwatch::seconds(const Stopwatch& from, Mark from_mark, const Stopwatch& to, Mark to_mark) {
  const auto begin = static_cast<size_t>(from_mark);
  const auto end = static_cast<size_t>(to_mark);
  if (from.device_.is_cpu()) {
    return std::chrono::duration<double>(to.times_[end] - from.times_[begin]).count();
  }
  return from.events_[begin]->elapsedTime(*to.events_[end]) * 1e-3;
}

void BucketTotals::add(const BucketTotals& other) {
  wire_bytes += other.wire_bytes;
  num_syncs += other.num_syncs;
  num_timed += other.num_timed;
  pack_time += other.pack_time;
  collective_time += other.collective_time;
  unpack_time += other.unpack_time;
}

void ForgottenTotals::add(std::shared_ptr<BucketTotals> totals) {
  add_up_what_is_final();
  open_.push_back(std::move(totals));
}

BucketTotals ForgottenTotals::sum() {
  add_up_what_is_final();
  BucketTotals sum = sum_;
  for (const auto& totals : open_) {
    sum.add(*totals);
  }
  return sum;
}

// Those that nobody else holds any more.
void ForgottenTotals::add_up_what_is_final() {
  std::erase_if(open_, [&](const auto& totals) {
    const bool is_final = totals.use_count() == 1;
    if (is_final) {
      sum_.add(*totals);
    }
    return is_final;
  });
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

bool SyncTimes::times_this_step(c10::Device device) const {
  constexpr int64_t kAllUntil = 32;
  constexpr int64_t kOneOf = 16;
  return device.is_cpu() || num_steps_ <= kAllUntil || num_steps_ % kOneOf == 0;
}

void SyncTimes::end_step() { steps_.back().ended = true; }

std::shared_ptr<Stopwatch> SyncTimes::start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device) {
  if (!times_this_step(device)) {
    return std::make_shared<Stopwatch>(device, /*measures=*/false);
  }
  const auto fits = [&](const auto& stopwatch) { return stopwatch->device() == device; };
  const auto found = std::find_if(unused_.begin(), unused_.end(), fits);
  std::shared_ptr<Stopwatch> stopwatch;
  if (found != unused_.end()) {
    stopwatch = std::move(*found);
    unused_.erase(found);
  } else {
    stopwatch = std::make_shared<Stopwatch>(device);
  }
  stopwatch->restart();
  steps_.back().laps.push_back({std::move(totals), stopwatch});
  return stopwatch;
}

SyncTotals SyncTimes::totals() {
  collect();
  SyncTotals totals;
  totals.num_timed_steps = num_timed_steps_;
  totals.exposed_time = exposed_time_;
  return totals;
}

// Adds up the steps that the device is done with.
void SyncTimes::collect() {
  const auto is_done = [](const Lap& lap) { return lap.stopwatch->done(); };
  for (auto step = steps_.begin(); step != steps_.end();) {
    if (step->ended && step->laps.empty()) {
      step = steps_.erase(step);
      continue;
    }
    if (!step->ended || !std::all_of(step->laps.begin(), step->laps.end(), is_done)) {
      ++step;
      continue;
    }
    add_up(*step);
    for (Lap& lap : step->laps) {
      unused_.push_back(std::move(lap.stopwatch));
    }
    step = steps_.erase(step);
  }
}

void SyncTimes::add_up(const Step& step) {
  double exposed = 0.0;
  for (const Lap& lap : step.laps) {
    const Stopwatch& watch = *lap.stopwatch;
    lap.totals->num_timed += 1;
    lap.totals->pack_time += Stopwatch::seconds(watch, Mark::kStart, watch, Mark::kSent);
    lap.totals->collective_time += Stopwatch::seconds(watch, Mark::kSent, watch, Mark::kReduced);
    lap.totals->unpack_time += Stopwatch::seconds(watch, Mark::kReduced, watch, Mark::kDone);
    const Stopwatch& last = *step.laps.back().stopwatch;
    if (last.device() == watch.device()) {
      exposed = std::max(exposed, Stopwatch::seconds(last, Mark::kSent, watch, Mark::kDone));
    }
  }
  num_timed_steps_ += 1;
  exposed_time_ += exposed;
}

}  // namespace fastsync
