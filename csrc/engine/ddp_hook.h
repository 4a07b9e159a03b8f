// DDP's way in: its buckets, as the Reducer hands them over, to BucketSync and back. No Python here, and no GIL.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/bucket_sync.h"
#include "engine/pairing.h"
#include "engine/parameter_residuals.h"
#include "engine/parameter_scales.h"
#include "engine/sync_times.h"

namespace fastsync {

// The buckets of a model, found again from step to step. Thread-safe. Models may share one, but then the statistics are
// of whichever came last.
class HookState {
 public:
  explicit HookState(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Averages the bucket's buffer in place; the future's value is the buffer. The first time that a bucket comes with a
  // schedule, the ranks check that they agree on both.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket, std::shared_ptr<const Schedule> schedule);

  // That of a hook registered with register_hook; may be set between steps, on all ranks at the same step. The ranks
  // check anew that they agree, even where it stays what it was: others may have set another.
  std::shared_ptr<const Schedule> schedule();
  void set_schedule(std::shared_ptr<const Schedule> schedule);

  // The number of the next step: what the schedule and the rounding go by.
  int64_t step();
  void set_step(int64_t step);

  // An optimizer has updated the parameters. From any thread.
  void note_update();

  // float64 [number of buckets, kNumStats]: a row for each bucket of the newest step.
  at::Tensor grad_stats();

  SyncTotals totals();
  int64_t num_steps();
  // Whether the newest sync is part of a CUDA graph, whose replays nobody counts here.
  bool is_captured();

  // The fp16 scale of each parameter's bucket, for checkpoints. Waits for the device.
  std::vector<ParameterScale> scales();
  void set_scales(const std::vector<ParameterScale>& scales);

  // What error feedback has not sent yet. Every rank has others.
  std::vector<ParameterResidual> residuals();
  void set_residuals(const std::vector<ParameterResidual>& residuals);

 private:
  struct Bucket {
    std::vector<ParameterId> parameters;
    std::shared_ptr<BucketSync> sync;
    std::shared_ptr<const Schedule> agreed;
    const char* why_agree = "it is new";
    int64_t number = 0;  // that the ranks have agreed on
    std::shared_ptr<Pairing> pairing;
    int64_t num_stamps = 0;
  };

  void disagree(const char* why);
  std::shared_ptr<Bucket> find_or_add(c10d::GradBucket& grad_bucket);
  void forget_buckets_of(const std::vector<at::Tensor>& parameters);
  at::Tensor stamp(Bucket& bucket, const std::vector<at::Tensor>& parameters, c10::Device device, bool has_room);
  void look_at_pairings();
  void agree(Bucket& bucket, c10d::GradBucket& grad_bucket, const std::shared_ptr<const Schedule>& schedule);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Whereabouts> whereabouts_;
  std::mutex mutex_;
  std::shared_ptr<const Schedule> schedule_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Bucket>> buckets_;  // by its first parameter
  ParameterScales saved_scales_;
  ParameterResiduals saved_residuals_;
  std::vector<std::shared_ptr<Bucket>> step_buckets_;  // the buckets of the newest backward so far
  bool step_is_open_ = false;
  size_t last_index_ = 0;
  ForgottenTotals forgotten_totals_;
  int64_t num_steps_ = 0;
  bool is_captured_ = false;
  int64_t step_ = -1;  // under way, or the newest
  SyncTimes times_;
  Strand strand_;
};

// Makes the reducer hand every bucket to the state, from C++, without the GIL. A reducer takes one hook, once.
void register_hook(c10d::Reducer& reducer, std::shared_ptr<HookState> state);

}  // namespace fastsync
