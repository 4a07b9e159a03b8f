// The entry point for FSDP2 reduce-scatters or averages the values that FSDP2's modules hand over in a backward, one
// after the other. It touches no Python object, and runs without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <optional>
#include <string>

#include "engine/engine_state.h"

namespace fastsync {

// Thread-safe. One state either reduce-scatters or averages, in all calls.
class ShardedState : public EngineState {
 public:
  explicit ShardedState(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // All ranks make the same calls. On a CPU a call is done on return, on CUDA the current stream waits. The identity is
  // a tensor with as many values and their dtype. It stands for values that come again in each step: scale, residuals
  // and statistics are kept for it.

  // The input has one shard for each rank, one after the other. The output becomes this rank's shard of the op's
  // result. Ranks add in float32 whatever the compression says.
  void reduce_scatter(const at::Tensor& identity, const std::string& name, const at::Tensor& output,
                      const at::Tensor& input, const c10d::ReduceOp& op);

  // Averages the values in place.
  void all_reduce(const at::Tensor& identity, const std::string& name, const at::Tensor& values);

 private:
  // Does a reduce-scatter, or an all-reduce if scatter is null.
  void run(const at::Tensor& identity, const std::string& name, const at::Tensor& values,
           const SendOptions::Scatter* scatter);
  void give_up() const override;
  void enter_step(const std::shared_ptr<Bucket>& bucket);

  std::weak_ptr<void> backward_;  // expires when the backward of the newest step ends or fails

  // All reduce-scatters share these, on the device of the first.
  std::optional<Teams> teams_;
  SumMemory memory_;
};

}  // namespace fastsync
