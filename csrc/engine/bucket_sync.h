// A bucket: what it keeps from step to step (scale, residuals, statistics, totals, teams, plan), and one sum of it
// under way. All entry points hand their gradients to this class, so numerics and errors are the same code.
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
#include "sums/bucket_sum.h"
#include "sums/error_feedback.h"
#include "sums/planned_sum.h"
#include "transport/progress_thread.h"
#include "transport/teams.h"

namespace fastsync {

class BucketSync;

// What the ranks have agreed on, of a whole engine or of one bucket, and whether what meets since belongs together.
struct Agreement {
  Agreement(const c10d::ProcessGroup& group, std::string what) : step_check(group, std::move(what)) {}

  StepCheck step_check;
  std::shared_ptr<const CompressionTable> compressions;  // null until they have
  int64_t version = 0;                                   // of the settings
  int64_t number = -1;                                   // from check_agreement
};

// One sync of a bucket: how, and what it has in common with its counterparts on other ranks.
struct Sync {
  // Where a reduce-scatter goes, with teams and memory that several buckets share, one after the other.
  struct Scatter {
    at::Tensor output;
    double factor;
    Teams& teams;
    SumMemory& memory;
  };

  Compression compression;
  int64_t step = 0;
  int tag = 0;                    // of its messages; the next kTagsPerBucket - 1 are its as well
  int64_t attempt = 0;            // the same where one step is sent twice, because it failed; 0: each is another
  bool is_weighted_mean = false;  // on all ranks
  at::Tensor weight = {};         // see Bucket
  bool in_place = false;          // nobody else uses the gradients' memory until the sync is over
  const Scatter* scatter = nullptr;
};
constexpr int kTagsPerBucket = 4;

// The first tag of an engine's buckets, from a number that its ranks have agreed on. Far from those that people choose,
// and with room for kMaxBuckets of them before another engine's begin.
constexpr int64_t kMaxBuckets = (1 << 14) / kTagsPerBucket;
inline int first_tag(int64_t number) {
  return static_cast<int>(1 << 30 | (number % (1 << 16)) * kMaxBuckets * kTagsPerBucket);
}

// One sum of a bucket under way, from send until receive or discard. Where it is destroyed before that, it keeps no
// rank waiting.
class BucketWork {
 public:
  ~BucketWork();

  // Has the progress thread do what can be done before receive, if there is anything; else receive does it, whatever
  // comes first.
  static void drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress);

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  void receive();
  // As receive, except that the averages go nowhere. The scale moves on as it does on other ranks.
  void discard();

  bool has_error_feedback() const { return sum_->bucket().residual.defined(); }
  // The sums of the side values, after receive. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return sum_->bucket().side_values; }

 private:
  friend class BucketSync;

  std::shared_ptr<BucketSync> sync_;
  std::unique_ptr<BucketSum> sum_;
  std::shared_ptr<Stopwatch> stopwatch_;
};

// Must be owned by a shared_ptr.
class BucketSync : public std::enable_shared_from_this<BucketSync> {
 public:
  // It notes where the engine stands.
  BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
             std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters,
             std::shared_ptr<Agreement> agreement);

  const std::vector<ParameterId> parameters;
  const std::shared_ptr<Agreement> agreement;

  // From now on the result is the mean times this.
  void set_mean_factor(double factor) { mean_factor_ = factor; }

  // Packs the gradients and sends them. They are dense, contiguous, of one supported dtype and on the bucket's device,
  // the same on every rank. Those that stand in for none take no part in error feedback. One sum at a time. Marks every
  // moment on the stopwatch.
  std::shared_ptr<BucketWork> send(std::vector<at::Tensor> grads, const Sync& sync,
                                   std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values = {},
                                   const std::vector<bool>& stand_in = {});

  // Whether side values cost no collective of their own, as far as the sum before tells. The same on all ranks.
  bool has_room() const { return memory_.plan != nullptr; }

  // Whether send waits for the other ranks: to make room in shared memory for what travels with another compression, or
  // to agree on the first fp16 scale, or on one after a step that says nothing of how large gradients are.
  bool waits_to_send(const Compression& compression) const {
    return planned_for_ != compression || needs_scale(compression);
  }

  // This rank sends no more: ranks that share its memory need not wait until the time-out.
  void give_up() const {
    if (teams_.shared()) {
      teams_.shared()->give_up();
    }
  }
  // Its parameters are other buckets' from now on.
  void replace() const {
    if (teams_.shared()) {
      teams_.shared()->replace();
    }
  }

  c10::Device device() const { return device_; }

  // The power of two that fp16 values are multiplied with: one float32 element; undefined where the next fp16 sync
  // finds it out.
  at::Tensor scale() const { return has_lost_scale() ? at::Tensor() : scale_; }
  void set_scale(at::Tensor scale) {
    scale_ = std::move(scale);
    has_followed_ = false;
  }

  ErrorFeedback& feedback() { return feedback_; }

  // The statistics are of these gradients alone, but for the largest magnitude, which the scale has followed.
  void measure(const std::vector<at::Tensor>& grads);

  // float64 [kNumStats] on the device, of the newest sync.
  const at::Tensor& stats() const { return stats_; }

  // Where the times of the syncs and what they sent add up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  friend class BucketWork;

  bool needs_scale(const Compression& compression) const {
    return compression.wire == DType::kFloat16 && (!scale_.defined() || has_lost_scale());
  }
  bool has_lost_scale() const;
  void agree_on_scale(const Bucket& bucket);
  Bucket bucket_of(std::vector<at::Tensor> grads, const Sync& sync, const at::Tensor& side_values);
  PlanKey plan_key(const Bucket& bucket, const Sync& sync, const Teams& teams) const;
  void choose_plan(const Bucket& bucket, const Sync& sync);
  std::unique_ptr<BucketSum> make_sum(Bucket bucket, const Sync& sync);
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
  bool is_half_sent_ = false;  // the newest sum: its messages would be taken for those of the next one
  bool has_followed_ = false;  // the scale, since it was set, what a sync has summed
  at::Tensor stats_;
  at::Tensor workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
};

}  // namespace fastsync
