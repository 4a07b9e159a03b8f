// The entry point for DDP gets buckets from DDP's Reducer, and averages them through Bucket. It touches no Python
// object, and runs without the GIL.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/backward.h"
#include "engine/engine_state.h"
#include "engine/gradient_hook.h"
#include "engine/snapshot.h"
#include "engine/weight.h"

namespace fastsync {

// The state of a DDP hook. It finds the buckets of a model again from step to step. Thread-safe. If several models
// share a state, the statistics are those of the newest step of any of them.
class HookState : public EngineState, public GradientListener, public std::enable_shared_from_this<HookState> {
 public:
  // With `sums`, buckets become the sum over the ranks and not the mean.
  HookState(c10::intrusive_ptr<c10d::ProcessGroup> group, bool sums)
      : EngineState(std::move(group), "a DDP hook", "with Join([ddp_model]):"), sums_(sums) {
    needs_stats_ = false;  // until somebody asks
  }

  // Averages the bucket's buffer in place; the future's value is the buffer. The ranks agree on each new bucket, and on
  // the compressions whenever these change.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket,
                                              std::shared_ptr<const CompressionTable> compressions);

  // From now on the ranks compare the names of the parameters, too, because layers may be of one shape.
  void compare_names(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names);

  // Sets the weight of this rank's gradients from the next step on. The first call has to come before the same step on
  // all ranks. Throws c10::Error if it was set for that step already, and one of the parameters has got a gradient
  // since.
  void set_weight(double weight, const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names);

  // Notes that an optimizer has updated the parameters. Any thread may call it.
  void note_update();

  // From now on a backward throws c10::Error if it is about to add to sums of the newest step, which would be summed
  // once more. Call it once, outside of a backward.
  static void watch_sums(const std::shared_ptr<HookState>& self, const std::vector<at::Tensor>& parameters);
  // Forgets the newest step's gradients, and ends what watch_sums began.
  void let_go();

  // Call it inside the backward of the newest step. At the end of that backward, once DDP has copied the means, it
  // notes which gradients hold them.
  static void note_gradients_later(const std::shared_ptr<HookState>& self);
  // Whether it is proven that the gradients are still those that the newest step left.
  bool gradients_are_unchanged();

 private:
  std::string describe_settings() const;
  std::string describe(const c10d::GradBucket& bucket) const;
  void complete_later(const std::shared_ptr<BucketWork>& work, c10::Device device, std::function<void()> complete,
                      bool is_last);
  void post_waiting(c10::Device device);
  void send_weight(Bucket& bucket);
  void before_gradient(size_t index) override;
  void note_gradients();
  std::shared_ptr<BucketWork> send(Bucket& bucket, c10d::GradBucket& grad_bucket, const Compression& compression);
  at::Tensor stamp(Bucket& bucket, c10d::GradBucket& grad_bucket);

  const bool sums_;
  Weight weight_;
  int64_t weighted_step_ = -1;                            // the step that the weight was set for
  std::optional<WeightSum> weights_;                      // those of the newest step; none without weights
  std::vector<std::shared_ptr<GradientHook>> sum_hooks_;  // one for each parameter, if sums are watched
  bool has_checked_sums_ = false;                         // whether a backward has begun since the newest step
  std::optional<size_t> newest_index_;                    // DDP's index of the newest bucket; none between steps
  std::vector<std::function<void()>> waiting_;            // completes buckets, see Note [Receives that send]
  int waiting_graph_task_ = kNoGraphTask;                 // the backward that these are of
  std::unordered_map<const c10::TensorImpl*, std::string> names_;  // of parameters; empty unless they are compared
  std::vector<std::pair<ParameterId, Snapshot>> averaged_;         // the gradients that note_gradients has noted
};

// What a reducer hands its buckets to, from C++ and without the GIL. A reducer takes only one hook, once, so the hook
// stays, and its state may go and come. Without a state it does what PyTorch's own all-reduce hook does. Thread-safe.
class HookPlace {
 public:
  // `group` is DDP's own.
  HookPlace(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Puts a state in, or nothing. Throws c10::Error inside a backward.
  void put(std::shared_ptr<HookState> state);

 private:
  struct Content;
  std::shared_ptr<Content> content_;  // the reducer has it, too
};

// Tells of each parameter whether a DistributedDataParallel that lives averages its gradients.
std::vector<bool> are_in_reducers(const std::vector<at::Tensor>& parameters);

}  // namespace fastsync
