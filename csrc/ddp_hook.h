// DDP's way in: its buckets, as the Reducer hands them over, to BucketSync and back. No Python here, and no GIL.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bucket_sync.h"
#include "sync_times.h"

namespace fastsync {

// The buckets of a model, found again from step to step. Thread-safe. Models may share one, but then the statistics are
// of whichever came last.
class HookState {
 public:
  explicit HookState(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Averages the bucket's buffer in place; the future's value is the buffer. The first time that a bucket comes with a
  // wire, the ranks check that they agree on both.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket, Wire wire);

  // The wire of a hook registered with register_hook; may be set between steps, on all ranks at the same step. The
  // ranks check anew that they agree, even where it stays what it was: others may have set another.
  Wire wire() const { return wire_; }
  void set_wire(Wire wire);

  // float64 [number of buckets, kNumStats]: a row for each bucket of the newest step.
  at::Tensor grad_stats();

  struct Totals {
    std::vector<BucketTotals> buckets;  // of the newest step, in DDP's order
    BucketTotals all;                   // of all the buckets there have been
    int64_t num_steps = 0;
    int64_t num_timed_steps = 0;
    double exposed_time = 0.0;  // seconds, see SyncTimes
  };
  Totals totals();
  int64_t num_steps();

  // The fp16 scale of each parameter's bucket, for checkpoints. Waits for the device.
  using ParameterScale = std::pair<at::Tensor, double>;
  std::vector<ParameterScale> scales();
  void set_scales(const std::vector<ParameterScale>& scales);

 private:
  // Weak, so that no model is kept alive, and no other can take its address while it is remembered here.
  using ParameterId = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  struct Bucket {
    std::vector<ParameterId> parameters;
    std::shared_ptr<BucketSync> sync;
    std::optional<Wire> agreed_wire;
  };

  struct SavedScale {
    ParameterId parameter;
    double scale;
  };

  std::shared_ptr<Bucket> find_or_add(c10d::GradBucket& grad_bucket);
  void forget_buckets_of(const std::vector<at::Tensor>& parameters);
  void agree(Bucket& bucket, c10d::GradBucket& grad_bucket, Wire wire);
  at::Tensor saved_scale(const Bucket& bucket) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::atomic<Wire> wire_{Wire::kNone};
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<Bucket>> buckets_;  // by its first parameter
  std::unordered_map<const c10::TensorImpl*, SavedScale> saved_scales_;
  std::string saved_scales_text_ = "no saved scales";
  std::vector<std::shared_ptr<Bucket>> step_;  // the buckets of the newest backward so far
  bool step_is_open_ = false;
  size_t last_index_ = 0;
  BucketTotals forgotten_totals_;
  int64_t num_steps_ = 0;
  SyncTimes times_;
};

// Makes the reducer hand every bucket to the state, from C++, without the GIL. A reducer takes one hook, once.
void register_hook(c10d::Reducer& reducer, std::shared_ptr<HookState> state);

}  // namespace fastsync
