// What every entry point keeps: its settings, what the ranks have agreed on, its buckets with what is saved of them,
// and what its steps have cost.
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

#include "engine/buckets.h"

namespace fastsync {

// Thread-safe through locked alone.
class EngineState {
 public:
  // The name and what a training loop is put inside where ranks have different numbers of batches are for errors.
  EngineState(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, const std::string& join = "");
  virtual ~EngineState() = default;

  // Ends the step of a backward that failed, where one is left.
  virtual void end_interrupted() {}

  // Calls, while nobody else uses the engine. What the result refers to is copied, for that may change afterwards.
  template <class Call>
  std::decay_t<std::invoke_result_t<Call>> locked(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call();
  }

  // ---- for the users of the engine, between steps ----

  // May be set between steps, on all ranks between the same ones. The ranks check anew that they agree, even where it
  // stays what it was: others may have set another.
  const std::shared_ptr<const CompressionTable>& compressions() { return compressions_; }
  void set_compressions(std::shared_ptr<const CompressionTable> compressions);

  // The number of the next step.
  int64_t step() { return step_; }
  void set_step(int64_t step) { step_ = step; }

  // float64 [kNumStats]: the sums over the newest step's buckets.
  at::Tensor grad_stats() { return buckets_.grad_stats(); }
  SyncTotals totals() { return buckets_.totals(); }
  int64_t num_steps() { return buckets_.times().num_steps(); }
  // Whether the newest sync is part of a CUDA graph, whose replays nobody counts here.
  bool is_captured() { return is_captured_; }

  // For checkpoints: the fp16 scale of each parameter's bucket, and what error feedback has not sent yet, of which
  // every rank has another. Waits for the device.
  std::vector<SavedState::Row> saved() { return buckets_.saved(); }
  void set_saved(const std::vector<SavedState::Row>& rows);

  // ---- for the steps ----

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  Liveness& liveness() { return *liveness_; }
  Buckets& buckets() { return buckets_; }
  ProgressThread& progress() { return progress_; }

  // In a forked child it throws c10::Error, which names the way out.
  void check_not_forked(const char* way_out) const;
  bool is_forked() const { return getpid() != process_id_; }

  // The number of the step that begins.
  int64_t take_number() { return step_++; }
  int64_t step_under_way() const { return step_ - 1; }
  // Its times are those of the buckets between begin_step and end_step, or the next begin_step.
  void begin_step() { buckets_.times().begin_step(); }
  std::shared_ptr<Stopwatch> start_bucket(const BucketSync& bucket);
  void end_step() { buckets_.times().end_step(); }

  // The ranks have to agree before the next step. The reason is for errors.
  void agree_anew(std::string why);
  bool have_agreed(const Agreement& agreement, const std::shared_ptr<const CompressionTable>& compressions) const;
  // Raises c10::ValueError where the ranks differ in the lines or in settings. What they agree on is named in other
  // errors: also where another rank averages in this step without agreeing anew.
  void agree(Agreement& agreement, const std::string& what, const std::shared_ptr<const CompressionTable>& compressions,
             int64_t step, const std::string& lines, c10::Device device);
  // The same for a bucket that has an agreement of its own, unless the ranks have agreed on it. The lines are asked for
  // only then. After this it has passed agreement in the step under way.
  void agree_on_bucket(const BucketSync& bucket, const std::string& name,
                       const std::shared_ptr<const CompressionTable>& compressions,
                       const std::function<std::string()>& lines);
  // This rank agrees on nothing more before it averages in the step.
  void pass_agreement(const Agreement& agreement, int64_t step) { liveness_->pass_agreement(step, agreement.number); }
  // Calls. What fails, but for a c10::ValueError, is no fault of the ranks' settings.
  void wait_for_ranks(const std::string& what, const std::function<void()>& call);

 protected:
  // This rank sends no more: those in shared memory wait for it beside the group.
  virtual void give_up() const;

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Liveness> liveness_;
  std::shared_ptr<const CompressionTable> compressions_;
  Buckets buckets_;
  ProgressThread progress_;

 private:
  void check_others_come(const std::string& why) const;

  const pid_t process_id_ = getpid();
  int64_t step_ = 0;
  int64_t version_ = 0;  // of the settings
  std::string why_agree_ = "its compression is another";
  bool is_captured_ = false;
};

}  // namespace fastsync
