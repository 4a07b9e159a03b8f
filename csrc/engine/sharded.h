// FSDP2's way in: what its modules hand over in a backward, to be reduce-scattered or averaged, one after the other. No
// Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/backward.h"
#include "engine/engine_state.h"

namespace fastsync {

// Must be owned by a shared_ptr. Thread-safe. For calls of one kind.
class ShardedState : public std::enable_shared_from_this<ShardedState>, private EngineState {
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

  // Calls a method of the state, while nobody else does.
  template <class Method, class... Args>
  auto locked(Method method, Args&&... args) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::invoke(method, static_cast<EngineState&>(*this), std::forward<Args>(args)...);
  }

 private:
  using Send = std::function<std::shared_ptr<BucketSync::Flight>(BucketSync& bucket, const Sync& sync,
                                                                 std::shared_ptr<Stopwatch> stopwatch)>;
  // same_for_all: all ranks get the same values.
  void run(const at::Tensor& identity, const std::string& name, const at::Tensor& values, bool same_for_all,
           bool in_background, const Send& send);
  void finish();
  std::shared_ptr<EngineBucket> find_or_add(const at::Tensor& identity, const std::string& name, c10::Device device);
  void enter_step(const at::Tensor& identity);
  void leave_step_last();
  void leave_step();
  std::shared_ptr<Team> team_for(const Bucket& bucket, BucketTotals& totals);
  void share_memory(const Bucket& bucket);

  std::mutex mutex_;
  std::atomic<bool> step_is_open_ = false;
  Backward backward_;  // that the step belongs to

  // The newest, while messages travel in the background.
  std::shared_ptr<EngineBucket> bucket_under_way_;
  std::shared_ptr<BucketSync::Flight> flight_;

  // Of all reduce-scatters.
  std::shared_ptr<Team> team_;
  std::shared_ptr<Host> host_;
  std::shared_ptr<SharedTeam> shared_;
  bool may_share_ = true;  // until a try has failed
  std::string why_not_;
  SumBuffers buffers_;  // of the newest; it and the next take turns, for two may be under way
  SumBuffers next_buffers_;
  SumBuffers shared_buffers_;  // of the team that shares memory, one at a time
  std::array<at::Tensor, 2> inputs_;
};

}  // namespace fastsync
