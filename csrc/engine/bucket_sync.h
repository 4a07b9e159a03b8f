// A bucket: what it keeps from step to step (scale, residuals, statistics, totals, teams), and one sum of it under way.
// All entry points hand their gradients to this class, so numerics and errors are the same code.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/compression.h"
#include "engine/failure.h"
#include "engine/host_copies.h"
#include "engine/saved_state.h"
#include "engine/step_check.h"
#include "engine/sync_times.h"
#include "sums/bucket_sum.h"
#include "sums/error_feedback.h"
#include "transport/progress_thread.h"
#include "transport/teams.h"

namespace fastsync {

// What the ranks have agreed on, of a whole engine or of one bucket, and whether what meets since belongs together.
struct Agreement {
  Agreement(const c10d::ProcessGroup& group, std::string what) : step_check(group, std::move(what)) {}

  StepCheck step_check;
  std::shared_ptr<const Schedule> schedule;  // null until they have
  int64_t version = 0;                       // of the settings
  int64_t number = -1;                       // from check_agreement
};

// One sync of a bucket: how, and what it has in common with its counterparts on other ranks.
struct Sync {
  // Where a reduce-scatter goes, with teams and memory that several buckets share, one after the other.
  struct Scatter {
    at::Tensor output;
    double factor;
    Teams& teams;
    SumMemory& memory;  // this and the next: where ranks do not share theirs, and where they do
    SumMemory& shared_memory;
  };

  Compression compression;
  int64_t step = 0;
  int tag = 0;                    // of its messages; the next kTagsPerBucket - 1 are its as well
  bool ends_step = false;         // once it has been received
  int64_t attempt = 0;            // the same where one step is sent twice, because it failed; 0: each is another
  bool is_weighted_mean = false;  // on all ranks
  at::Tensor weight = {};         // see Bucket
  const Scatter* scatter = nullptr;
};
constexpr int kTagsPerBucket = 4;

// What a bucket of so many values travels with. Throws c10::ValueError where that changes from step to step and a CUDA
// graph is being captured on the device.
const Compression& compression_for(const Schedule& schedule, int64_t step, int64_t numel, c10::Device device);

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

  // Throws what went wrong in send once others had to expect the bucket: it goes to them as nan, and is to be received
  // or discarded as any other.
  void check_sent() const;

  // Has the progress thread do what can be done before receive, if there is anything; else receive does it, whatever
  // comes first.
  static void drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress);

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  void receive();
  // As receive, except that the averages go nowhere. The scale moves on as it does on other ranks.
  void discard();

  bool has_error_feedback() const { return sum_->bucket().keeps_losses; }
  // The sums of the side values, after receive. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return sum_->side_values(); }

 private:
  friend class BucketSync;

  std::unique_ptr<BucketSum> sum_;
  std::function<void(const at::Tensor&)> on_side_values_;
  std::shared_ptr<const std::string> failure_;
  std::shared_ptr<Whereabouts> whereabouts_;
  bool ends_step_ = false;
  std::shared_ptr<Stopwatch> stopwatch_;
  std::shared_ptr<BucketTotals> totals_;
  std::shared_ptr<const HostCopies> copies_;  // null where gradients stay where they are
};

class BucketSync {
 public:
  // It notes where the engine stands.
  BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
             std::shared_ptr<Whereabouts> whereabouts, std::vector<ParameterId> parameters,
             std::shared_ptr<Agreement> agreement);
  ~BucketSync();

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

  // send, and receive when the group is done, on the thread that says so or on the progress thread. A single gradient
  // of the wire's dtype may be its own wire, so nothing else may use its memory meanwhile. What is called with the
  // sums of the side values may throw. The future's value is the buffer. Of a bucket that is a whole step, which
  // backward hides nothing of, the caller may be given what is left to do: to be called without a lock, on this thread.
  using OnSideValues = std::function<void(const at::Tensor&)>;
  c10::intrusive_ptr<c10::ivalue::Future> sync(const at::Tensor& buffer, std::vector<at::Tensor> grads,
                                               const Sync& sync, std::shared_ptr<Stopwatch> stopwatch,
                                               ProgressThread& progress, const at::Tensor& side_values = {},
                                               OnSideValues on_side_values = nullptr,
                                               std::function<void()>* rest = nullptr);
  // Whether side values travel with the gradients, and not in a collective of their own.
  bool has_room(const std::vector<at::Tensor>& grads, const Compression& compression) const;

  // Whether send waits for the other ranks, to share memory with them, or to agree on the first fp16 scale, or on one
  // after a step that says nothing of how large gradients are.
  bool waits_to_send(const Compression& compression) const { return teams_.may_share() || needs_scale(compression); }

  // Where sums, statistics, scales and residuals are, and side values have to be: that of the gradients, or the host
  // where the process group does not work there. See HostCopies.
  c10::Device device() const { return device_; }
  c10::Device device_of_gradients() const { return device_of_gradients_; }

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
  bool is_elsewhere() const { return device_ != device_of_gradients_; }
  bool needs_scale(const Compression& compression) const {
    return compression.wire == Wire::kFloat16 && (!scale_.defined() || has_lost_scale());
  }
  std::shared_ptr<BucketWork> start(std::vector<at::Tensor> grads, const Sync& sync,
                                    std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                    const std::vector<bool>& stand_in, bool is_for_future);
  Bucket bucket_of(std::vector<at::Tensor> grads, const Sync& sync);
  void share_memory(const Bucket& bucket, const Sync& sync);
  bool adds_hosts_at_once(const Bucket& bucket, const Compression& compression) const;
  std::shared_ptr<Team> team_for(const Compression& compression) const;
  std::unique_ptr<BucketSum> make_sum(Bucket bucket, const Sync& sync, bool is_for_future);
  std::unique_ptr<BucketSum> make_scatter(Bucket bucket, const Sync& sync) const;
  bool has_lost_scale() const;
  void agree_on_scale(const Bucket& bucket);
  void guard(const std::function<void()>& call) const { fastsync::guard(*failure_, *whereabouts_, call); }

  c10::Device device_of_gradients_;
  c10::Device device_;
  Teams teams_;
  SumMemory memory_;  // this and the next: for messages, and where ranks share memory
  SumMemory shared_memory_;
  double mean_factor_ = 1.0;
  std::shared_ptr<const std::string> failure_;  // the beginning of errors
  std::shared_ptr<Whereabouts> whereabouts_;
  at::Tensor host_memory_;                    // this and the next: of gradients that are elsewhere
  std::shared_ptr<const HostCopies> copies_;  // for the next sum
  ErrorFeedback feedback_;
  at::Tensor scale_;
  bool has_followed_ = false;  // the scale, since it was set, what a sync has summed
  at::Tensor stats_;
  at::Tensor workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
  // What the process group itself reports on, of the newest sync that has a future.
  std::optional<c10::weak_intrusive_ptr<c10::ivalue::Future>> newest_;
  const pid_t process_id_ = getpid();
};

}  // namespace fastsync
