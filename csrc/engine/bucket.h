// A bucket: parameters whose gradients travel together. It lasts from step to step, with its scale, residuals,
// statistics, totals, teams and plan. All entry points hand their gradients to it, so numerics and errors are the same
// code.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/compression.h"
#include "engine/failure.h"
#include "engine/saved_state.h"
#include "engine/step_check.h"
#include "engine/sync_times.h"
#include "sums/error_feedback.h"
#include "sums/planned_sum.h"
#include "sums/sum_work.h"
#include "transport/progress_thread.h"
#include "transport/teams.h"

namespace fastsync {

class Bucket;

// What the ranks of an engine, or of one bucket, have agreed on. Its step check tells whether the gradients that meet
// from then on belong together.
struct Agreement {
  Agreement(const c10d::ProcessGroup& group, std::string what) : step_check(group, std::move(what)) {}

  StepCheck step_check;
  std::shared_ptr<const CompressionTable> compressions;  // null until they have agreed
  int64_t version = 0;                                   // of the settings
  int64_t number = -1;                                   // from check_agreement
};

// How a bucket is sent in one step. All of it but the weight is the same on all ranks.
struct SendOptions {
  // Where the result of a reduce-scatter goes. Several buckets share its teams and memory, one after the other.
  struct Scatter {
    at::Tensor output;
    double factor;
    Teams& teams;
    SumMemory& memory;
  };

  Compression compression;
  int64_t step = 0;
  int tag = 0;                    // of its messages, which have the next kTagsPerBucket - 1 as well
  int64_t attempt = 0;            // the same if a step that failed is sent again; with 0 each is another one
  bool is_weighted_mean = false;  // on all ranks
  at::Tensor weight = {};         // see FlatGradients
  bool in_place = false;          // nobody else uses the gradients' memory until the sum is there
  const Scatter* scatter = nullptr;
};
constexpr int kTagsPerBucket = 4;

// The first tag of an engine's buckets, from a number that its ranks have agreed on. It is far from the tags that
// people choose. There is room for kMaxBuckets before the tags of another engine begin.
constexpr int64_t kMaxBuckets = (1 << 14) / kTagsPerBucket;
inline int first_tag(int64_t number) {
  return static_cast<int>(1 << 30 | (number % (1 << 16)) * kMaxBuckets * kTagsPerBucket);
}

// A bucket of a step under way, from send until receive or discard. If it is destroyed before that, no rank has to wait
// for it.
class BucketWork {
 public:
  ~BucketWork();

  // The progress thread does what can be done before receive, if there is anything. If receive comes first, it does it
  // itself.
  static void drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress);

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  void receive();
  // Does the same, but the averages go nowhere. The scale follows them as it does on other ranks.
  void discard();

  bool has_error_feedback() const { return sum_->gradients().residual.defined(); }
  // The sums of the side values, after receive. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return sum_->gradients().side_values; }

 private:
  friend class Bucket;

  std::shared_ptr<Bucket> bucket_;
  std::unique_ptr<SumWork> sum_;
  std::shared_ptr<Stopwatch> stopwatch_;
};

// Must be owned by a shared_ptr.
class Bucket : public std::enable_shared_from_this<Bucket> {
 public:
  // It tells liveness what the engine is doing.
  Bucket(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
         std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement);

  const std::vector<ParameterId> parameters;
  const std::shared_ptr<Agreement> agreement;

  // The result is the mean times this factor from now on.
  void set_mean_factor(double factor) { mean_factor_ = factor; }

  // Packs the gradients and sends them. They are dense, contiguous, of one supported dtype and on the bucket's device,
  // the same on every rank. Only one sum may be under way. stand_in: gradients that stand in for missing ones, which
  // take no part in error feedback; empty if there are none. Each moment is marked on the stopwatch.
  std::shared_ptr<BucketWork> send(std::vector<at::Tensor> grads, const SendOptions& options,
                                   std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values = {},
                                   const std::vector<bool>& stand_in = {});

  // Whether side values cost no collective of their own, as the newest sum tells. The same on all ranks.
  bool has_room() const { return memory_.plan != nullptr; }

  // Whether send waits for the other ranks: to make room in shared memory for another compression, or to agree on an
  // fp16 scale. There is none to follow in the first step, and after a step that says nothing of how large gradients
  // are.
  bool waits_to_send(const Compression& compression) const {
    return planned_for_ != compression || needs_scale(compression);
  }

  // Tells the ranks that share its memory that this rank sends no more, so that they need not wait until the time-out.
  void give_up() const {
    if (teams_.shared()) {
      teams_.shared()->give_up();
    }
  }
  // Tells them that its parameters belong to other buckets from now on.
  void replace() const {
    if (teams_.shared()) {
      teams_.shared()->replace();
    }
  }

  c10::Device device() const { return device_; }

  // The power of two that fp16 values are multiplied with: one float32 element. Undefined if the next fp16 sync has to
  // find it out.
  at::Tensor scale() const { return has_lost_scale() ? at::Tensor() : scale_; }
  void set_scale(at::Tensor scale) {
    scale_ = std::move(scale);
    has_followed_ = false;
  }

  ErrorFeedback& feedback() { return feedback_; }

  // Takes the statistics of these gradients alone, except the largest magnitude, which the scale has followed.
  void measure(const std::vector<at::Tensor>& grads);

  // The statistics of the newest sync: float64 [kNumStats] on the device.
  const at::Tensor& stats() const { return stats_; }

  // The sums over its syncs of what they have cost.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  friend class BucketWork;

  bool needs_scale(const Compression& compression) const {
    return compression.wire == DType::kFloat16 && (!scale_.defined() || has_lost_scale());
  }
  bool has_lost_scale() const;
  void agree_on_scale(const FlatGradients& gradients);
  FlatGradients flatten(std::vector<at::Tensor> grads, const SendOptions& options, const at::Tensor& side_values);
  PlanKey plan_key(const FlatGradients& gradients, const SendOptions& options, const Teams& teams) const;
  void choose_plan(const FlatGradients& gradients, const SendOptions& options);
  std::unique_ptr<SumWork> make_sum(FlatGradients gradients, const SendOptions& options);
  void guard(const std::function<void()>& call) const { fastsync::guard(failure_, *liveness_, call); }

  c10::Device device_;
  Teams teams_;
  SumMemory memory_;
  std::optional<Compression> planned_for_;  // of the newest plan; none until that has its memory
  double mean_factor_ = 1.0;
  std::string failure_;  // the beginning of errors
  std::shared_ptr<Liveness> liveness_;
  ErrorFeedback feedback_;
  at::Tensor scale_;
  bool is_half_sent_ = false;  // the newest sum, whose messages would be taken for those of the next one
  bool has_followed_ = false;  // the scale has followed a sum since it was set
  at::Tensor stats_;
  at::Tensor workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
};

}  // namespace fastsync
