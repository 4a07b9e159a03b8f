#include "engine/bucket_work.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "engine/bucket.h"
#include "transport/without_python_objects.h"

namespace fastsync {

BucketWork::BucketWork(std::shared_ptr<Bucket> bucket, std::unique_ptr<SumWork> sum,
                       std::shared_ptr<Stopwatch> stopwatch)
    : bucket_(std::move(bucket)), sum_(std::move(sum)), stopwatch_(std::move(stopwatch)) {}

BucketWork::~BucketWork() {
  join_streams();
  SumWork::abandon(std::move(sum_));
}

// The task does nothing if the work is gone by then. It takes this thread's state along, so that a profiler sees what
// happens on the other thread.
void BucketWork::drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress) {
  if (!work->sum_->needs_driving()) {
    return;
  }
  const WithoutPythonObjects without_python;
  auto drive = at::wrapPropagateTLSState([weak = std::weak_ptr(work)] {
    if (const auto driven = weak.lock()) {
      driven->sum_->drive();
    }
  });
  try {
    progress.post(work->bucket_->device(), std::move(drive), /*is_urgent=*/true);
  } catch (const std::system_error&) {  // there is no thread: receive does it
  }
}

// The task runs at once, and its errors are for the thread that calls receive.
void BucketWork::receive_beside(ProgressThread& progress) {
  const auto is_shared = [](const at::Tensor& gradient) { return gradient.storage().use_count() > 1; };
  if (receive_sends() || std::ranges::any_of(sum_->gradients().grads, is_shared)) {
    return;
  }
  progress.post(bucket_->device(), [this, stream = current_stream(bucket_->device())] {
    unpacked_to_ = sum_->gradients().grads;
    called_on_ = stream;
    try {
      receive_now();
    } catch (...) {
      error_ = std::current_exception();
    }
    unpacked_.set(bucket_->device());
  });
}

// A destructor calls it, too. So it throws nothing: if the device has failed, the next call of torch says so.
void BucketWork::join_streams() const noexcept {
  if (unpacked_to_.empty() || !sum_->is_of_this_process()) {
    return;
  }
  try {
    const c10::StreamGuard guard(*called_on_);
    unpacked_.wait();
  } catch (...) {
  }
}

void BucketWork::receive() {
  if (unpacked_to_.empty()) {
    receive_now();
    return;
  }
  unpacked_.wait();
  unpacked_to_.clear();
  use_on_current_stream(side_values());
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void BucketWork::receive_now() {
  const std::vector<at::Tensor>& grads = sum_->gradients().grads;  // receive lets go of them
  const at::Tensor mean = grads.size() == 1 ? grads.front() : at::Tensor();
  try {
    guard(bucket_->failure_, *bucket_->liveness_, [&] { sum_->receive([&] { stopwatch_->mark(Mark::kReduced); }); });
  } catch (...) {
    bucket_->agreement->is_broken = true;
    throw;
  }
  if (!leaves_stats_out()) {
    bucket_->note_measured();
  } else {
    bucket_->note_unmeasured({mean.defined() ? mean : at::empty({0})});  // of several a step tells where they are
  }
  bucket_->totals()->wire_bytes += sum_->sent_bytes();
  stopwatch_->mark(Mark::kDone);
}

void BucketWork::discard() {
  if (unpacked_to_.empty()) {
    sum_->gradients().unpack_to_nowhere();
  }
  receive();
}

}  // namespace fastsync
