// A bucket is a set of parameters whose gradients travel together. It lasts from step to step, with its scale,
// residuals, statistics, totals, teams and plan. All entry points hand their gradients to it, so they share one code
// for numerics and errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/bucket_scale.h"
#include "engine/bucket_shards.h"
#include "engine/bucket_stats.h"
#include "engine/bucket_sums.h"
#include "engine/bucket_work.h"
#include "engine/failure.h"
#include "engine/saved_state.h"
#include "engine/send_options.h"
#include "engine/step_check.h"
#include "engine/sync_times.h"
#include "sums/error_feedback.h"

namespace fastsync {

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
  void set_mean_factor(double factor) { sums_.set_mean_factor(factor); }
  // See BucketSums::set_micro_batches.
  void set_micro_batches(int64_t num_micro_batches) { sums_.set_micro_batches(num_micro_batches); }

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
  bool has_plan() const { return sums_.has_plan(); }

  // Whether send waits for the other ranks: to make room in shared memory for another compression, or to agree on an
  // fp16 scale.
  bool waits_to_send(const Compression& compression) const {
    return sums_.may_need_room(compression) || scale_.needs_agreement(compression);
  }

  // Tells the ranks that share the bucket's memory that this rank sends no more, so that they need not wait until the
  // time-out.
  void give_up() const { sums_.teams().give_up(); }
  // Tells those ranks that the bucket's parameters belong to other buckets from now on.
  void replace() const {
    if (sums_.teams().shared()) {
      sums_.teams().shared()->regions()->replace();
    }
  }

  c10::Device device() const { return sums_.teams().all()->device(); }

  // The scale as one float32 element. Undefined if the next fp16 sync has to find it out.
  at::Tensor scale() const { return scale_.value(); }
  void set_scale(const at::Tensor& scale) { scale_.set(scale); }
  // See BucketScale.
  void follow_all_shards(double factor);

  ErrorFeedback& feedback() { return feedback_; }

  // The newest right factor of each gradient, which is undefined if there is none; see LowRankSum. Equal on all ranks.
  const std::vector<at::Tensor>& factors() const { return sums_.factors(); }

  // Begins anew with a scale, with residuals and factors by gradient.
  void set_saved(const at::Tensor& scale, const std::vector<at::Tensor>& residuals, std::vector<at::Tensor> factors);

  // Forgets the scale and the factors, which have to be equal on all ranks.
  void forget_equal_state() {
    scale_.set({});
    sums_.factors().clear();
  }

  // Puts the scale, the residuals and the factors back to what they were before this step, if the bucket was sent in
  // it. The step must have been one that may be rolled back.
  void roll_back(int64_t step);

  // Which means this rank keeps, in the memory that each sum writes to, if ranks keep shards. It is made anew if the
  // plan changes. Then it has another number, and no two shards of the process have the same.
  const std::vector<ShardPiece>& shard() const { return sums_.shards().own(); }
  // Which means each rank keeps, in the order of the ranks that ShardGroup::ranks has.
  const std::vector<std::vector<ShardPiece>>& shards() const { return sums_.shards().of_ranks(); }
  int64_t shard_number() const { return sums_.shards().number(); }
  // Makes the means of a gradient zeros, also in the statistics.
  void drop_from_shard(size_t gradient);
  // Takes the statistics that all ranks have of their shards, in place of this rank's own. The scale follows them.
  void take_stats(const std::vector<const double*>& of_shards);
  // The same on a device, of float64 [ranks, kNumStats].
  void take_stats(const at::Tensor& of_shards);

  // The statistics of the newest sync, see BucketStats.
  const at::Tensor& stats() const { return stats_.values(); }
  void measure(const std::vector<at::Tensor>& grads) { stats_.measure(grads); }
  void multiply(const std::vector<at::Tensor>& means, const at::Tensor& factors) { stats_.multiply(means, factors); }
  void note_measured() { stats_.note_taken(); }
  void note_unmeasured(const std::vector<at::Tensor>& means) { stats_.note_left_out(means); }
  void take_left_out_stats() { stats_.take_left_out(); }

  // The costs of the bucket's syncs, added up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  friend class BucketWork;

  // The state before a step.
  struct Before {
    int64_t step;
    at::Tensor scale;
    std::vector<at::Tensor> factors;
    std::optional<ErrorFeedback> feedback = {};  // if the step has dropped it
  };

  void set_factors(std::vector<at::Tensor> factors) { sums_.factors() = std::move(factors); }
  void keep_before(int64_t step);
  void put_residuals_back();
  void keep_error(FlatGradients& gradients, const SendOptions& options, const std::vector<bool>& stand_in);
  std::unique_ptr<SumWork> make_sum(std::vector<at::Tensor> grads, const SendOptions& options, Stopwatch& stopwatch,
                                    const at::Tensor& side_values, const std::vector<bool>& stand_in);

  const std::string failure_;  // the beginning of errors
  const std::shared_ptr<Liveness> liveness_;
  const std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
  const std::shared_ptr<Workspace> workspace_;
  BucketStats stats_;
  BucketSums sums_;
  BucketScale scale_;
  ErrorFeedback feedback_;
  bool is_half_sent_ = false;     // whether the newest send failed, and its messages would be taken for the next one's
  std::optional<Before> before_;  // the newest step that may be rolled back
};

}  // namespace fastsync
