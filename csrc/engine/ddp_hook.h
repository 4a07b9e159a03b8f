// DDP's way in: its buckets, as the Reducer hands them over, to BucketSync and back. No Python here, and no GIL.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/snapshot.h"

namespace fastsync {

// The buckets of a model, found again from step to step. Thread-safe. Models may share one, but then the statistics are
// of whichever came last.
class HookState : public EngineState {
 public:
  explicit HookState(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : EngineState(std::move(group), "a DDP hook", "with Join([ddp_model]):") {}

  // Averages the bucket's buffer in place; the future's value is the buffer. The first time that a bucket comes with a
  // table, the ranks check that they agree on both.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket,
                                              std::shared_ptr<const CompressionTable> compressions);

  // An optimizer has updated the parameters. From any thread.
  void note_update();

  // Inside the backward of the newest step: at its end, once DDP has copied the averages, notes what they are.
  static void note_gradients_later(const std::shared_ptr<HookState>& self);
  // Whether the gradients are still those that the newest step left; false also where that cannot be proven.
  bool gradients_are_unchanged();

 private:
  void note_gradients();
  at::Tensor stamp(BucketSync& bucket, c10d::GradBucket& grad_bucket);
  int64_t step_under_way() { return step_ - 1; }

  bool step_is_open_ = false;
  size_t last_index_ = 0;
  std::vector<std::pair<ParameterId, Snapshot>> averaged_;  // none where nobody has noted them
};

// Makes the reducer hand every bucket to the state, from C++, without the GIL. A reducer takes
// one hook, once.
void register_hook(c10d::Reducer& reducer, std::shared_ptr<HookState> state);

}  // namespace fastsync
