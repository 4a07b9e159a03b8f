// EngineState is the base of all entry points. It keeps the settings, the buckets, and the number of the step, and
// makes the ranks agree.
#pragma once

#include <ATen/core/Tensor.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine/bucket_registry.h"
#include "engine/weight_check.h"

namespace fastsync {

// Thread-safe only through `locked`.
class EngineState {
 public:
  // `name` and `join` are for errors. `join` is the context in which ranks may have different numbers of batches; empty
  // if there is none.
  EngineState(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, const std::string& join = "");
  virtual ~EngineState() = default;

  // Ends the step of a backward that failed, if one is left.
  virtual void end_interrupted() {}

  // Makes the call while no other thread uses the engine. A result that is a reference is copied, because it may change
  // later.
  template <class Call>
  std::decay_t<std::invoke_result_t<Call>> locked(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call();
  }

  // ---- for the users of the engine, between steps ----

  // All ranks must set the compressions between the same two steps. The ranks agree anew even if the compressions stay
  // the same, because other ranks may have set others.
  const std::shared_ptr<const CompressionTable>& compressions() { return compressions_; }
  void set_compressions(std::shared_ptr<const CompressionTable> compressions);

  // The number of the next step.
  int64_t step() { return step_; }
  void set_step(int64_t step) {
    step_ = step;
    liveness_->forget_passed_agreements();
  }

  // The statistics of the newest step, as sums over its buckets: float64 [kNumStats]. Throws c10::Error if nobody had
  // asked before the step, and its means have changed since.
  at::Tensor grad_stats();
  SyncTotals totals() { return buckets_.totals(); }
  int64_t num_steps() { return buckets_.times().num_steps(); }
  // Whether the newest sync was captured in a CUDA graph. Its replays are not counted as steps.
  bool is_captured() { return is_captured_; }

  // Returns the state for a checkpoint: the fp16 scale of each parameter's bucket, its residual, which differs from
  // rank to rank, and its factor. Waits for the device.
  std::vector<SavedState::Row> saved() { return buckets_.saved(); }
  void set_saved(const std::vector<SavedState::Row>& rows);

  // From now on a step may be rolled back, at the cost of a second set of residuals. Errors come at once: they do not
  // tell where the other ranks are.
  void make_revocable() {
    is_revocable_ = true;
    liveness_->ask_nobody();
  }
  bool is_revocable() const { return is_revocable_; }
  // Whether somebody has asked for statistics.
  bool needs_stats() const { return needs_stats_; }
  // Makes scales and residuals what they were before the newest step.
  void roll_back_step();

  // From now on the ranks compare these parameters, see WeightCheck.
  void compare_weights(const std::vector<at::Tensor>& parameters, std::vector<std::string> names, std::string machine) {
    weight_check_ = std::make_shared<WeightCheck>(group_, parameters, std::move(names), std::move(machine));
  }
  // Whether sample_weights will read the weights.
  bool is_sample_due() { return weight_check_ && !is_captured_ && weight_check_->is_due(step_ - 1); }
  // Call it when an optimizer has stepped with averages. Returns whether a sample of the weights was taken.
  bool sample_weights() {
    // Replays of a CUDA graph are no steps of the engine.
    return weight_check_ && !is_captured_ && weight_check_->note_update(step_ - 1);
  }
  // Null if nobody compares them.
  const std::shared_ptr<WeightCheck>& weight_check() const { return weight_check_; }

  // Notes that gradients have weights from the next step on.
  void begin_weights();

  // ---- for the steps ----

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  Liveness& liveness() { return *liveness_; }
  BucketRegistry& buckets() { return buckets_; }
  ProgressThread& progress() { return progress_; }

  // Throws c10::Error in a forked child. The error tells the way out.
  void check_not_forked(const char* way_out) const;
  bool is_forked() const { return getpid() != process_id_; }

  // Returns the number of a step that begins.
  int64_t take_number() { return step_++; }
  int64_t step_under_way() const { return step_ - 1; }
  // A step's times are those of the buckets between begin_step and end_step. Without end_step, the next begin_step ends
  // the step.
  void begin_step();
  std::shared_ptr<Stopwatch> start_bucket(const Bucket& bucket);
  void end_step() { buckets_.times().end_step(); }

  // The next five functions are explained in Note [Agreement].

  // Makes the ranks agree again before the next step. The reason is for errors.
  void agree_anew(std::string why);
  // Whether the agreement still holds, for these compressions.
  bool have_agreed(const Agreement& agreement, const std::shared_ptr<const CompressionTable>& compressions) const;
  // Makes the ranks agree on the lines and the settings. Throws c10::ValueError if they differ. Throws c10::Error if a
  // rank does not come, or has passed the agreement. `what` names in errors what has failed.
  void agree(Agreement& agreement, const std::string& what, const std::shared_ptr<const CompressionTable>& compressions,
             int64_t step, const std::string& lines, c10::Device device);
  // Does the same for a bucket that has an agreement of its own, unless that still holds. Calls `lines` only if it
  // needs them. Then it passes the agreement in the step under way.
  void agree_on_bucket(const Bucket& bucket, const std::string& name,
                       const std::shared_ptr<const CompressionTable>& compressions,
                       const std::function<std::string()>& lines);
  // Tells other ranks that this rank goes on in the step, and does not replace the agreement.
  void pass_agreement(const Agreement& agreement, int64_t step) { liveness_->pass_agreement(step, agreement.number); }
  // Makes a call that waits for other ranks. Its errors tell which ranks are missing. A c10::ValueError is passed on as
  // it is.
  void wait_for_ranks(const std::string& what, const std::function<void()>& call);

  // Tells the ranks that share memory with this rank that it sends no more. They would not notice it by the process
  // group.
  virtual void give_up() const;

 protected:
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Liveness> liveness_;
  std::shared_ptr<const CompressionTable> compressions_;
  BucketRegistry buckets_;
  ProgressThread progress_;
  bool needs_stats_ = true;

 private:
  void check_others_come(const std::string& why) const;

  const pid_t process_id_ = getpid();
  int64_t step_ = 0;
  int64_t version_ = 0;                                   // how often the ranks had to agree anew
  std::string why_agree_ = "its compression is another";  // the newest reason
  bool is_captured_ = false;
  bool is_revocable_ = false;
  std::shared_ptr<WeightCheck> weight_check_;
};

}  // namespace fastsync
