// The entry point for FSDP2's all-gathers: each rank sends its shards of a module's parameters to all ranks, in the
// wire's dtype. A rank takes its own shards, too, as the wire has carried them. So all ranks compute with the same
// bits. With shard_optimizer ranks without shared memory gather new parameters, and the optimizer's state, by it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_state.h"
#include "sums/planned_sum.h"

namespace fastsync {

class ParameterGather;

// One gather at a time has this memory. If ranks share it, they choose the same one for the same gather, because they
// begin and end their gathers in the same order.
struct GatherMemory {
  GatherMemory(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device)
      : teams(std::move(group), device, "parameters") {}

  // Makes the work that gathers the values, of which each rank has one part.
  std::unique_ptr<SumWork> make_work(FlatGradients values, int first_tag, int64_t module);

  Teams teams;
  at::Tensor buffer;  // undefined at first
  std::atomic<bool> is_in_use = true;
};

// A module, as a gather sees it.
struct GatheredModule {
  std::string name;
  std::shared_ptr<BucketTotals> totals = std::make_shared<BucketTotals>();
  std::shared_ptr<Workspace> workspace = nullptr;  // null before the first gather
  at::Tensor stats = {};                           // nobody reads what the passes write here
};

// A gather that is under way, until wait. If it is destroyed before that, no rank waits in vain.
class GatherWork {
 public:
  ~GatherWork() { let_go(); }

  // Waits until all shards have come, and writes them to the output. On CUDA the current stream waits. Only the first
  // call does anything.
  void wait();

 private:
  friend class ParameterGather;

  void let_go();

  std::shared_ptr<ParameterGather> engine_;
  const GatheredModule* module_ = nullptr;  // the engine's
  int64_t step_ = 0;
  std::shared_ptr<GatherMemory> memory_;
  std::unique_ptr<SumWork> work_;
  bool is_received_ = false;
  std::shared_ptr<Stopwatch> stopwatch_;
};

// Thread-safe. Each gather is a step of this engine.
class ParameterGather : public EngineState, public std::enable_shared_from_this<ParameterGather> {
 public:
  // The names are those of the modules, and `what` gathers them, for errors.
  ParameterGather(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<std::string> names,
                  const std::string& what);

  // Begins to gather the parameters of the module with this index. The output has one shard of all of them for each
  // rank, one after the other, and this rank's shard is there already. `numels` are the sizes of the parameters in a
  // shard: on a wire of blocks each begins a block. All ranks make the same calls in the same order.
  std::shared_ptr<GatherWork> all_gather(size_t module, const at::Tensor& output, const std::vector<int64_t>& numels);

  // The costs of the modules' gathers, added up, in the order of the names.
  std::vector<BucketTotals> totals();

  void give_up() const override;

 private:
  FlatGradients flatten(GatheredModule& module, const at::Tensor& output, const std::vector<int64_t>& numels) const;
  std::shared_ptr<GatherMemory> free_memory(c10::Device device);

  std::vector<GatheredModule> modules_;
  Agreement agreement_;
  std::vector<std::shared_ptr<GatherMemory>> memories_;
  size_t newest_memory_ = 0;  // index of the one that was taken last
};

}  // namespace fastsync
