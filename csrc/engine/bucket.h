// A bucket is a set of parameters whose gradients travel together. It lasts from step to step, with its scale,
// residuals, statistics, totals, teams and plan. All entry points hand their gradients to it, so they share one code
// for numerics and errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/compression.h"
#include "engine/failure.h"
#include "engine/saved_state.h"
#include "engine/step_check.h"
#include "engine/sync_times.h"
#include "sums/error_feedback.h"
#include "sums/low_rank_sum.h"
#include "sums/planned_sum.h"
#include "sums/sparse_sum.h"
#include "sums/sum_work.h"
#include "transport/progress_thread.h"
#include "transport/teams.h"

namespace fastsync {

class Bucket;

// Values of one gradient whose means a rank keeps.
struct ShardPiece {
  size_t gradient;  // its index in the bucket
  int64_t begin;    // the index of the first value, in the order of the gradient's memory
  int64_t numel;
  at::Tensor means;  // undefined if another rank keeps them
};
// Pieces begin and end at multiples of so many values, or where their gradient ends. torch's vectorised kernels then
// give each value the same bits in a piece as in the whole gradient.
constexpr int64_t kPieceValues = 64;

// Note [Agreement]
//   Ranks that send different gradients, or send them in different ways, would hang or add up garbage. So they compare
//   lines of text before they send: check_agreement throws on every rank if the lines differ.
//     who      With attach, an engine has one agreement on all its buckets. The entry points for DDP and FSDP2 have one
//              for each bucket. A rank that has to agree calls EngineState::agree, and so waits for the other ranks.
//     version  An engine counts the changes after which its ranks must agree again, such as a loaded state. An
//              agreement holds while this version and the compressions are the same as when it was made.
//     number   It is the same on all ranks, and is another each time they agree. Tags and stamps follow from it.
//     passed   A rank has passed an agreement in a step if it goes on to send under it. If another rank waits in that
//              step to replace the same agreement, it waits in vain. Heartbeats tell which agreements a rank has
//              passed, and so end that wait with an error.
//     broken   A sync that fails on one rank may have succeeded on another, whose scale has followed it. So the rank on
//              which it has failed has to agree anew, and then all ranks forget what has to be equal on them.

// Tells what the ranks have agreed on for an engine, or for one bucket. See Note [Agreement].
struct Agreement {
  Agreement(const c10d::ProcessGroup& group, std::string what) : step_check(group, std::move(what)) {}

  StepCheck step_check;                                  // checks the gradients that are sent under the agreement
  std::shared_ptr<const CompressionTable> compressions;  // null until the ranks have agreed
  int64_t version = 0;                                   // the engine's version when the ranks agreed
  std::atomic<bool> is_broken = false;                   // whether a sync under it has failed on this rank
  int64_t number = -1;                                   // the result of check_agreement; below 0 before the first
};

// Tells how a bucket is sent in one step. All members but the weight and has_failed are the same on all ranks.
struct SendOptions {
  // Tells where a reduce-scatter takes place. Several buckets share its teams and, on a CPU, its memory, one after the
  // other. On a device the memory is null. There each bucket keeps a plan of its own, and its buffer only for one sum.
  struct Scatter {
    at::Tensor output;  // becomes this rank's shard of the sum, times the factor
    double factor;
    Teams& teams;
    SumMemory* memory;
  };

  Compression compression;
  int64_t step = 0;
  int tag = 0;                       // the first of its messages' kTagsPerBucket tags
  int64_t step_count = 0;            // see Team::begin
  bool is_weighted_mean = false;     // whether ranks have weights, and the result is a mean
  at::Tensor weight = {};            // see FlatGradients
  bool in_place = false;             // whether nobody else uses the gradients' memory until the sum is there
  const Scatter* scatter = nullptr;  // null for an all-reduce
  bool may_be_taken_back = false;    // see Bucket::take_back
  bool keeps_shard = false;          // whether the gradients stay what they are, and Bucket::shard takes the means
  bool may_share_memory = true;      // whether ranks of a host may add up in memory that they share
  bool has_failed = false;           // whether this rank sends nan in place of gradients
  bool needs_stats = true;           // whether somebody may ask for the statistics of the means
};
constexpr int kTagsPerBucket = 4;

// Returns the first tag of an engine's buckets, from a number that its ranks have agreed on. It is far from the tags
// that people choose. There is room for kMaxBuckets before the tags of another engine begin.
constexpr int64_t kMaxBuckets = (1 << 14) / kTagsPerBucket;
inline int first_tag(int64_t number) {
  return static_cast<int>(1 << 30 | (number % (1 << 16)) * kMaxBuckets * kTagsPerBucket);
}

// A bucket whose sum is under way, from send until receive or discard. If it is destroyed before that, no rank waits in
// vain.
class BucketWork {
 public:
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

  // Whether receive sends as well, see SumWork::finish_sends.
  bool receive_sends() const { return sum_->finish_sends(); }

  bool has_error_feedback() const { return sum_->gradients().residual.defined(); }
  // The sums of the side values, after receive. They may lie in memory that the bucket's next sum writes to.
  const at::Tensor& side_values() const { return sum_->gradients().side_values; }

 private:
  friend class Bucket;

  void finish();

  std::shared_ptr<Bucket> bucket_;
  std::unique_ptr<SumWork> sum_;
  std::shared_ptr<Stopwatch> stopwatch_;

  // These are set by receive_beside.
  std::vector<at::Tensor> unpacked_to_;  // the gradients, until the current stream has waited for them
  std::optional<c10::Stream> called_on_;
  StreamMark unpacked_;
  std::exception_ptr error_;
};

// Note [Captured steps]
//   A CUDA graph of a step goes on using the memory of its capture. What the engine then replaces, the graph keeps, see
//   hold_for_graph. A scale and residuals that are loaded are written where the old ones are, so that replays go on
//   from them.

// Must be owned by a shared_ptr.
class Bucket : public std::enable_shared_from_this<Bucket> {
 public:
  // The name is for errors. The bucket tells liveness what the engine is doing.
  Bucket(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
         std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement);

  const std::vector<ParameterId> parameters;
  const std::shared_ptr<Agreement> agreement;

  // From now on the result is the mean times this factor.
  void set_mean_factor(double factor) { mean_factor_ = factor; }

  // Packs the gradients and sends them. They must be dense, contiguous, of one supported dtype, on the bucket's device,
  // and of the same sizes on every rank. Or there is one that is sparse in its first dimension, on every rank. Only one
  // sum may be under way. stand_in tells which gradients stand in for missing ones, see ErrorFeedback; it is empty if
  // none do. The stopwatch notes the moments of the sum.
  std::shared_ptr<BucketWork> send(std::vector<at::Tensor> grads, const SendOptions& options,
                                   std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values = {},
                                   const std::vector<bool>& stand_in = {});

  // Whether the newest sum had a plan, so that the ranks added up by themselves and side values travelled in the plan's
  // rows. Without a plan the process group adds up, and side values may cost a collective of their own. The same on all
  // ranks.
  bool has_plan() const { return memory_.plan != nullptr; }

  // Whether send waits for the other ranks: to make room in shared memory for another compression, or to agree on an
  // fp16 scale. The ranks agree on a scale in the first step, and after a step that does not tell how large gradients
  // are.
  bool waits_to_send(const Compression& compression) const {
    return planned_for_ != compression || needs_scale(compression);
  }

  // Tells the ranks that share the bucket's memory that this rank sends no more, so that they need not wait until the
  // time-out.
  void give_up() const {
    if (teams_.shared()) {
      teams_.shared()->give_up();
    }
  }
  // Tells those ranks that the bucket's parameters belong to other buckets from now on.
  void replace() const {
    if (teams_.shared()) {
      teams_.shared()->replace();
    }
  }

  c10::Device device() const { return device_; }

  // The scale: the power of two that fp16 values are multiplied with, as one float32 element. Undefined if the next
  // fp16 sync has to find it out.
  at::Tensor scale() const { return has_scale_ && !has_lost_scale() && !largest_comes_ ? scale_ : at::Tensor(); }
  void set_scale(const at::Tensor& scale);

  // After a reduce-scatter, whose result was the sum times the factor, a rank knows its shard of the means alone. This
  // has the ranks tell each other the largest magnitude of all shards. It does not wait: the next sum's scale follows
  // from what comes.
  void follow_all_shards(double factor);

  ErrorFeedback& feedback() { return feedback_; }

  // The newest right factor of each gradient, which is undefined if there is none; see LowRankSum. Equal on all ranks.
  const std::vector<at::Tensor>& factors() const { return low_rank_.factors; }
  void set_factors(std::vector<at::Tensor> factors) { low_rank_.factors = std::move(factors); }

  // Forgets the scale and the factors, which have to be equal on all ranks.
  void forget_equal_state() {
    set_scale({});
    low_rank_.factors.clear();
  }

  // Puts the scale, the residuals and the factors back to what they were before this step, if the bucket was sent in
  // it. The step must have been one that may be taken back.
  void take_back(int64_t step);

  // With keeps_shard: which means this rank keeps, in the memory that each sum writes to. It is made anew if the plan
  // changes. Then it has another number, and no two shards of the process have the same.
  const std::vector<ShardPiece>& shard() const;
  // Which means each rank keeps, in the order of the ranks that Meeting::ranks has.
  const std::vector<std::vector<ShardPiece>>& shards() const { return shards_; }
  int64_t shard_number() const { return shard_number_; }
  // Makes the means of a gradient zeros, also in the statistics.
  void drop_from_shard(size_t gradient);
  // Takes the statistics that all ranks have of their shards, in place of this rank's own. The scale follows
  // them.
  void take_stats(const std::vector<const double*>& all);

  // Replaces the newest sync's statistics by those of these gradients. The largest magnitude stays, because the scale
  // has followed it.
  void measure(const std::vector<at::Tensor>& grads);

  // Takes the statistics of the newest sync, if they were left out. Throws c10::Error if its means are no longer there.
  void take_left_out_stats();

  // The statistics of the newest sync: float64 [kNumStats] on the device.
  const at::Tensor& stats() const { return stats_; }

  // The costs of the bucket's syncs, added up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  friend class BucketWork;

  // The state before a step.
  struct Before {
    int64_t step;
    at::Tensor scale;
    std::vector<at::Tensor> residuals;
    std::vector<at::Tensor> factors;
  };

  bool needs_scale(const Compression& compression) const {
    return compression.wire == DType::kFloat16 && (!has_scale_ || has_lost_scale());
  }
  bool has_lost_scale() const;
  void take_largest();
  void agree_on_scale(const FlatGradients& gradients);
  FlatGradients flatten(std::vector<at::Tensor> grads, const SendOptions& options, const at::Tensor& side_values);
  PlanKey plan_key(const FlatGradients& gradients, const SendOptions& options, const Teams& teams) const;
  void choose_plan(const FlatGradients& gradients, const SendOptions& options, SumMemory& memory);
  void check_may_shard(const PlanKey& key, const SendOptions& options) const;
  void make_shards(const FlatGradients& gradients);
  std::unique_ptr<SumWork> make_dense_sum(std::vector<at::Tensor> grads, const SendOptions& options,
                                          Stopwatch& stopwatch, const at::Tensor& side_values,
                                          const std::vector<bool>& stand_in);
  std::unique_ptr<SumWork> make_sparse_sum(const at::Tensor& gradient, SendOptions options, Stopwatch& stopwatch,
                                           const at::Tensor& side_values);
  SumMemory& memory_for(const SendOptions& options) {
    return options.scatter && options.scatter->memory ? *options.scatter->memory : memory_;
  }
  std::unique_ptr<SumWork> make_sum(FlatGradients gradients, const SendOptions& options);
  std::unique_ptr<SumWork> make_sum(FlatGradients gradients, const SendOptions& options, SumMemory& memory);
  std::unique_ptr<SumWork> make_low_rank_sum(FlatGradients gradients, SendOptions options);
  void note_unmeasured(const at::Tensor& means);
  void guard(const std::function<void()>& call) const { fastsync::guard(failure_, *liveness_, call); }

  c10::Device device_;
  Teams teams_;
  SumMemory memory_;
  std::optional<Compression> planned_for_;  // the newest plan's compression; none until the plan has its memory
  double mean_factor_ = 1.0;
  std::string failure_;  // the beginning of errors
  std::shared_ptr<Liveness> liveness_;
  ErrorFeedback feedback_;
  LowRankState low_rank_;
  at::Tensor scale_;  // float32 [1], the same memory from step to step, see Note [Captured steps]
  bool has_scale_ = false;
  bool is_half_sent_ = false;     // whether the newest send failed, and its messages would be taken for the next one's
  bool has_followed_ = false;     // whether the scale has followed a sum since it was set
  std::optional<Before> before_;  // the newest step that may be taken back
  at::Tensor stats_;
  std::mutex unmeasured_mutex_;                                 // guards the next
  std::optional<std::pair<ParameterId, uint32_t>> unmeasured_;  // means without statistics, and their version
  at::Tensor shard_means_;
  std::vector<std::vector<ShardPiece>> shards_;
  int64_t shard_number_ = 0;
  at::Tensor scale_sent_;  // the scale of the newest sum, if that keeps a shard or scatters, and has one
  at::Tensor largest_;     // the largest magnitude of the newest means, on all ranks once largest_comes_ has waited
  std::unique_ptr<Transfer> largest_comes_;  // null unless follow_all_shards has sent it
  std::shared_ptr<Workspace> workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
};

}  // namespace fastsync
