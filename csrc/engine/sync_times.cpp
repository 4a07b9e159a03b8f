#include "engine/sync_times.h"

#include <algorithm>

#include "passes/cuda_graphs.h"
#include "transport/streams.h"

namespace fastsync {

void Stopwatch::mark(Mark mark) {
  if (!measures_) {
    return;
  }
  Moment& moment = moments_[static_cast<size_t>(mark)];
  if (device_.is_cpu()) {
    moment.time = std::chrono::steady_clock::now();
  } else {
    moment.event.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT).record(current_stream(device_));
  }
  marked_done_ = mark == Mark::kDone;
}

// A query of an event would end a capture that is under way.
bool Stopwatch::done() const {
  const auto& event = at(Mark::kDone).event;
  return marked_done_ && !is_capturing(device_) && (!event || event->query());
}

double Stopwatch::seconds(const Moment& from, const Moment& to) {
  return from.event ? from.event->elapsedTime(*to.event) * 1e-3
                    : std::chrono::duration<double>(to.time - from.time).count();
}

void Stopwatch::add_up() const {
  totals_->num_timed += 1;
  totals_->pack_time += seconds(at(Mark::kStart), at(Mark::kSent));
  totals_->collective_time += seconds(at(Mark::kSent), at(Mark::kReduced));
  totals_->unpack_time += seconds(at(Mark::kReduced), at(Mark::kDone));
}

double Stopwatch::seconds_after(const Stopwatch& last) const {
  return device_ == last.device_ ? seconds(last.at(Mark::kSent), at(Mark::kDone)) : 0.0;
}

void BucketTotals::add(const BucketTotals& other) {
  wire_bytes += other.wire_bytes;
  num_syncs += other.num_syncs;
  num_timed += other.num_timed;
  pack_time += other.pack_time;
  collective_time += other.collective_time;
  unpack_time += other.unpack_time;
}

void SyncTimes::begin_step() {
  constexpr size_t kMaxSteps = 8;  // how far the host may run ahead of the device before a step goes untimed
  end_step();                      // because the step before may have left out its last bucket
  collect();
  if (steps_.size() >= kMaxSteps) {
    steps_.pop_front();
  }
  steps_.emplace_back();
  num_steps_ += 1;
}

void SyncTimes::end_step() {
  if (!steps_.empty()) {
    steps_.back().ended = true;
  }
}

std::shared_ptr<Stopwatch> SyncTimes::start_bucket(std::shared_ptr<BucketTotals> totals, c10::Device device) {
  constexpr int64_t kAllUntil = 32;
  constexpr int64_t kOneOf = 16;
  const bool is_timed = device.is_cpu() || num_steps_ <= kAllUntil || num_steps_ % kOneOf == 0;
  auto stopwatch = std::make_shared<Stopwatch>(std::move(totals), device, is_timed && !is_capturing(device));
  if (steps_.empty()) {
    steps_.emplace_back();  // because the step's first buckets have been added up already
  }
  if (is_timed) {
    steps_.back().buckets.push_back(stopwatch);
  }
  return stopwatch;
}

void SyncTimes::collect() {
  std::erase_if(steps_, [&](const Step& step) {
    const auto& buckets = step.buckets;
    if (!step.ended || !std::all_of(buckets.begin(), buckets.end(), [](const auto& each) { return each->done(); })) {
      return false;
    }
    double exposed = 0.0;
    for (const auto& bucket : buckets) {
      bucket->add_up();
      exposed = std::max(exposed, bucket->seconds_after(*buckets.back()));
    }
    num_timed_steps_ += buckets.empty() ? 0 : 1;
    exposed_time_ += exposed;
    return true;
  });
}

}  // namespace fastsync
