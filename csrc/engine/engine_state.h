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

#include "engine/bucket_sync.h"

namespace fastsync {

// Thread-safe through locked alone.
class EngineState {
 public:
  // The name and what a training loop is put inside where ranks have different numbers of batches are for errors.
  EngineState(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, const std::string& join = "");
  virtual ~EngineState() = default;

  // Ends the step of a backward that failed, where one is left.
  virtual void end_interrupted() {}

  // Calls a method of the engine, while nobody else does. What it refers to is copied, for that may change afterwards.
  template <class Engine, class Result, class... Parameters, class... Args>
  std::decay_t<Result> locked(Result (Engine::*method)(Parameters...), Args&&... args) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return (static_cast<Engine&>(*this).*method)(std::forward<Args>(args)...);
  }

  // May be set between steps, on all ranks between the same ones. The ranks check anew that they agree, even where it
  // stays what it was: others may have set another.
  std::shared_ptr<const CompressionTable> compressions() { return compressions_; }
  void set_compressions(std::shared_ptr<const CompressionTable> compressions);

  // The number of the next step.
  int64_t step() { return step_; }
  void set_step(int64_t step) { step_ = step; }

  // float64 [kNumStats]: the sums over the newest step's buckets.
  at::Tensor grad_stats();
  SyncTotals totals();
  int64_t num_steps() { return times_.num_steps(); }
  // Whether the newest sync is part of a CUDA graph, whose replays nobody counts here.
  bool is_captured() { return is_captured_; }

  // For checkpoints: the fp16 scale of each parameter's bucket, and what error feedback has not sent yet, of which
  // every rank has another. Waits for the device.
  std::vector<SavedState::Row> saved();
  void set_saved(const std::vector<SavedState::Row>& rows);

 protected:
  // In a forked child it throws c10::Error, which names the way out.
  void check_not_forked(const char* way_out) const;
  bool is_forked() const { return getpid() != process_id_; }

  void agree_anew(std::string why);
  // This rank agrees on nothing more before it averages in the step.
  void pass_agreement(const Agreement& agreement, int64_t step) { liveness_->pass_agreement(step, agreement.number); }
  bool have_agreed(const Agreement& agreement, const std::shared_ptr<const CompressionTable>& compressions) const;
  // Raises c10::ValueError where the ranks differ in the lines or in settings. What they agree on is named in other
  // errors: also where another rank averages in this step without agreeing anew.
  void agree(Agreement& agreement, const std::string& what, const std::shared_ptr<const CompressionTable>& compressions,
             int64_t step, const std::string& lines, c10::Device device);
  // What fails in the call, but for a c10::ValueError, is no fault of the ranks' settings.
  void wait_for_ranks(const std::string& what, const std::function<void()>& call);

  // This rank sends no more: those in shared memory wait for it beside the group.
  virtual void give_up() const;

  // The bucket of these parameters, which is what it is known by. A new one begins with what is saved of them, and
  // takes the place of those that held one of them, or one that is gone.
  std::shared_ptr<BucketSync> find_or_add(const std::vector<at::Tensor>& parameters, const std::string& name,
                                          c10::Device device);
  std::shared_ptr<BucketSync> add_bucket(std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement,
                                         const std::string& name, c10::Device device);
  // Their residuals and totals are kept.
  void forget_buckets(const std::function<bool(const BucketSync&)>& which);

  // A step is the buckets between begin_step and end_step, or the next begin_step.
  void begin_step() { times_.begin_step(); }
  std::shared_ptr<Stopwatch> start_bucket(const BucketSync& bucket);
  void end_step() { times_.end_step(); }

  std::mutex mutex_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Liveness> liveness_;
  std::shared_ptr<const CompressionTable> compressions_;
  int64_t step_ = 0;
  std::vector<std::shared_ptr<BucketSync>> known_buckets_;
  std::vector<std::shared_ptr<BucketSync>> newest_buckets_;  // of the newest step so far: the entry point says which
  SavedState saved_;
  ProgressThread progress_;

 private:
  void begin_with_saved(BucketSync& bucket);
  void check_others_come(const std::string& why) const;

  const pid_t process_id_ = getpid();
  int64_t version_ = 0;  // of the settings
  std::string why_agree_ = "its compression is another";
  BucketTotals forgotten_totals_;  // of buckets that are no more
  bool is_captured_ = false;
  SyncTimes times_;
};

}  // namespace fastsync
