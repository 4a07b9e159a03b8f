// FSDP2's way in: what its modules hand over in a backward, to be reduce-scattered or averaged, one after the other. No
// Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "engine/backward.h"
#include "engine/engine_state.h"

namespace fastsync {

// Must be owned by a shared_ptr. Thread-safe. For calls of one kind.
class ShardedState : public EngineState, public std::enable_shared_from_this<ShardedState> {
 public:
  explicit ShardedState(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Values that come again from step to step have one identity, a tensor of as many and of their dtype, which state is
  // kept of. Each call is the same on all ranks. On a CPU it is done on return, on CUDA the current stream waits.

  // The input is one shard after the other, one for each rank: the output becomes this rank's of their mean, or of
  // what else the op is. Sums are taken in float32 whatever the compression says. in_background: nobody reads the
  // output before the next call has returned or the backward has ended, so a CPU may do something else while messages
  // travel.
  void reduce_scatter(const at::Tensor& identity, const std::string& name, const at::Tensor& output,
                      const at::Tensor& input, const c10d::ReduceOp& op, bool in_background);

  // Memory for an input on a CPU: an earlier one's, once nobody has that any more. Fresh pages cost more than what is
  // copied to them.
  at::Tensor allocate_input(int64_t numel, at::ScalarType dtype);

  // Averages the values in place.
  void all_reduce(const at::Tensor& identity, const std::string& name, const at::Tensor& values);

 private:
  // same_for_all: all ranks get the same values.
  void run(const at::Tensor& identity, const std::string& name, const at::Tensor& values, bool same_for_all,
           bool in_background, const Sync::Scatter* scatter);
  void finish();
  void enter_step(const std::shared_ptr<BucketSync>& bucket);
  void leave_step_last();
  void leave_step();

  std::atomic<bool> step_is_open_ = false;
  Backward backward_;  // that the step belongs to

  // The newest, while messages travel in the background.
  std::shared_ptr<BucketSync> bucket_under_way_;
  std::shared_ptr<BucketWork> work_;

  // Of all reduce-scatters, on the device of the first.
  std::optional<Teams> teams_;
  SumMemory memory_;  // of the newest; it and the next take turns, for two may be under way
  SumMemory next_memory_;
  SumMemory shared_memory_;
  std::array<at::Tensor, 2> inputs_;
};

}  // namespace fastsync
