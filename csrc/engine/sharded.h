// FSDP2's way in: what its modules hand over in a backward, to be reduce-scattered or averaged, one after the other. No
// Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <optional>
#include <string>

#include "engine/engine_state.h"

namespace fastsync {

// Thread-safe. For calls of one kind.
class ShardedState : public EngineState {
 public:
  explicit ShardedState(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Values that come again from step to step have one identity, a tensor of as many and of their dtype, which state is
  // kept of. Each call is the same on all ranks. On a CPU it is done on return, on CUDA the current stream waits.

  // The input is one shard after the other, one for each rank: the output becomes this rank's of their mean, or of
  // what else the op is. Sums are taken in float32 whatever the compression says.
  void reduce_scatter(const at::Tensor& identity, const std::string& name, const at::Tensor& output,
                      const at::Tensor& input, const c10d::ReduceOp& op);

  // Averages the values in place.
  void all_reduce(const at::Tensor& identity, const std::string& name, const at::Tensor& values);

 private:
  // Without scatter all ranks get the same values.
  void run(const at::Tensor& identity, const std::string& name, const at::Tensor& values, const Sync::Scatter* scatter);
  void give_up() const override;
  void enter_step(const std::shared_ptr<BucketSync>& bucket);

  std::weak_ptr<void> backward_;  // that the newest step belongs to, until it ends or fails

  // Of all reduce-scatters, on the device of the first.
  std::optional<Teams> teams_;
  SumMemory memory_;
};

}  // namespace fastsync
