// A bucket whose sum is under way, from Bucket::send until receive or discard.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "engine/sync_times.h"
#include "sums/sum_work.h"
#include "transport/progress_thread.h"
#include "transport/streams.h"

namespace fastsync {

class Bucket;

// If it is destroyed before it has received, no rank waits in vain.
class BucketWork {
 public:
  BucketWork(std::shared_ptr<Bucket> bucket, std::unique_ptr<SumWork> sum, std::shared_ptr<Stopwatch> stopwatch);
  ~BucketWork();

  // Has the progress thread do what can be done before receive, if there is anything. If receive comes first, receive
  // does it.
  static void drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress);

  // Has the engine's own stream receive beside backward, as soon as the sum has come. It is for devices with streams:
  // on a CPU nothing is unpacked before receive. Does nothing if anybody else holds memory of the gradients, see
  // Note [Unpacking beside backward] in step.cpp. Nor does it do anything if receive sends.
  void receive_beside(ProgressThread& progress);
  // Makes the stream on which receive_beside was called wait for what it has begun.
  void join_streams() const noexcept;

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  void receive();
  // Does the same, but the gradients stay what they are, unless receive_beside has averaged them. The scale follows the
  // means as it does on other ranks.
  void discard();

  // Whether receive sends as well, see SumWork::receive_sends.
  bool receive_sends() const { return sum_->receive_sends(); }

  // Whether the statistics were left out. The bucket has noted of which mean, if there is one alone.
  bool leaves_stats_out() const { return sum_->leaves_stats_out(); }

  bool has_error_feedback() const { return sum_->gradients().residual.defined(); }
  // The sums of the side values, after receive. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return sum_->gradients().side_values; }

 private:
  void receive_now();

  const std::shared_ptr<Bucket> bucket_;
  std::unique_ptr<SumWork> sum_;
  const std::shared_ptr<Stopwatch> stopwatch_;

  // These are set by receive_beside.
  std::vector<at::Tensor> unpacked_to_;  // the gradients, until the current stream has waited for them
  std::optional<c10::Stream> called_on_;
  StreamMark unpacked_;
  std::exception_ptr error_;
};

}  // namespace fastsync
