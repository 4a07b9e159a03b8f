// What every entry point keeps: its settings, what the ranks have agreed on, its buckets, and the number of its step.
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

  // Ends the step of a backward that failed, if one is left.
  virtual void end_interrupted() {}

  // Calls while no other thread uses the engine. A result that is a reference is copied, because it may change later.
  template <class Call>
  std::decay_t<std::invoke_result_t<Call>> locked(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call();
  }

  // ---- for the users of the engine, between steps ----

  // May be set between steps, on all ranks between the same ones. The ranks agree anew even if the compressions stay
  // the same, because other ranks may have set others.
  const std::shared_ptr<const CompressionTable>& compressions() { return compressions_; }
  void set_compressions(std::shared_ptr<const CompressionTable> compressions);

  // The number of the next step.
  int64_t step() { return step_; }
  void set_step(int64_t step) { step_ = step; }

  // float64 [kNumStats]: the sums over the newest step's buckets.
  at::Tensor grad_stats() { return buckets_.grad_stats(); }
  SyncTotals totals() { return buckets_.totals(); }
  int64_t num_steps() { return buckets_.times().num_steps(); }
  // Whether the newest sync was captured in a CUDA graph. Its replays are not counted as steps.
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

  // Throws c10::Error in a forked child. The error names the way out.
  void check_not_forked(const char* way_out) const;
  bool is_forked() const { return getpid() != process_id_; }

  // The number of a step that begins.
  int64_t take_number() { return step_++; }
  int64_t step_under_way() const { return step_ - 1; }
  // The times of a step are those of its buckets between begin_step and end_step, or the next begin_step.
  void begin_step() { buckets_.times().begin_step(); }
  std::shared_ptr<Stopwatch> start_bucket(const Bucket& bucket);
  void end_step() { buckets_.times().end_step(); }

  // The ranks have to agree again before the next step. The reason is for errors.
  void agree_anew(std::string why);
  bool have_agreed(const Agreement& agreement, const std::shared_ptr<const CompressionTable>& compressions) const;
  // Throws c10::ValueError if the ranks differ in the lines or in settings. Other errors name what they were to agree
  // on. Such an error also comes if another rank averages in this step without agreeing.
  void agree(Agreement& agreement, const std::string& what, const std::shared_ptr<const CompressionTable>& compressions,
             int64_t step, const std::string& lines, c10::Device device);
  // Does the same for a bucket that has an agreement of its own, unless the ranks have agreed on it already. The lines
  // are asked for only if they are needed. Then this rank has passed agreement in the step under way.
  void agree_on_bucket(const Bucket& bucket, const std::string& name,
                       const std::shared_ptr<const CompressionTable>& compressions,
                       const std::function<std::string()>& lines);
  // Notes for other ranks that this one agrees on nothing more before it averages in the step.
  void pass_agreement(const Agreement& agreement, int64_t step) { liveness_->pass_agreement(step, agreement.number); }
  // Calls what waits for other ranks. An error says who is missing. A c10::ValueError is passed on as it is.
  void wait_for_ranks(const std::string& what, const std::function<void()>& call);

 protected:
  // Tells the ranks that share memory with this one that it sends no more: they do not wait through the group alone.
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
  int64_t version_ = 0;                                   // how often the ranks had to agree anew
  std::string why_agree_ = "its compression is another";  // the newest reason
  bool is_captured_ = false;
};

}  // namespace fastsync
