// The entry point attach averages the gradients of a set of parameters, step after step. Hooks on the gradient
// accumulators tell which gradients are ready. Full buckets are sent while backward goes on, and the end of backward
// waits for them. It touches no Python object, and runs without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/backward.h"
#include "engine/engine_state.h"
#include "engine/gradient_flags.h"
#include "engine/gradient_hook.h"
#include "engine/lateness.h"
#include "engine/layout.h"
#include "engine/model_buffers.h"
#include "engine/named_values.h"
#include "engine/parameter.h"
#include "engine/shards.h"
#include "engine/side_values.h"
#include "engine/signal.h"
#include "engine/stamps.h"
#include "engine/step.h"
#include "engine/used_parameters.h"
#include "engine/weight.h"

namespace fastsync {

// What lasts from step to step. A Step is the step under way.
//
// Must be owned by a shared_ptr. It holds its lock even while it waits for other ranks. Only one thread at a time may
// run backwards of its parameters.
class Synchronizer : public EngineState, public GradientListener, public std::enable_shared_from_this<Synchronizer> {
 public:
  // The names, one for each parameter, are for errors. `sparse` has the names of the parameters whose gradients are
  // sparse, which go with the mean over all ranks alone.
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, Op op,
               const std::set<std::string>& sparse);
  ~Synchronizer() override;

  // Puts hooks on the parameters, which must be those of the constructor. Frozen ones get hooks, too, because they may
  // be unfrozen later. The parameters live as long as this object, until detach. Do not call it inside a backward.
  // Without overlap, nothing is sent before synchronize. Then there are hooks only for op="sum", see Note [Sums].
  void attach(const std::vector<at::Tensor>& parameters, bool overlap);
  void detach();

  // Averages every gradient that there is. On a CPU it waits, on CUDA the current stream waits.
  void synchronize();

  // Ends the step of a backward that has failed, if there is one. It sends what other ranks wait for, and takes part in
  // what they send.
  void abandon_step();

  // Ends the interrupted steps of all engines. On a CPU it waits for other ranks. Inside a backward it does nothing.
  void end_interrupted() override;

  // Notes that an optimizer has updated the parameters. Any thread may call it.
  void note_update() { agreement_->step_check.note_update(); }

  // ---- between steps; the methods from here on are not thread-safe ----

  // While the engine is disabled, backward lets gradients accumulate.
  void set_enabled(bool enabled) { is_enabled_ = enabled; }

  // Makes the ranks agree. Throws c10::ValueError if they differ in parameters or settings. The first step calls it, if
  // nobody did. With init_sync, all ranks take over the parameters of one rank after it.
  void agree(bool init_sync);

  // Has the next step average a float32 tensor. It replaces an earlier one of that name.
  void piggyback(const std::string& name, const at::Tensor& value);
  // The means of the tensors that were piggybacked on the newest step.
  const NamedValues::Tensors& piggybacked() { return named_.means(); }

  // Sets the weight of this rank's gradients from the next step on. The first call has to come before the same step on
  // all ranks. Throws c10::Error if the step has gradients already, because another weight may be meant for them.
  void set_weight(double weight);

  // Has each rank's gradients be a sum over some of so many micro-batches, see Bucket::set_micro_batches. Call it on
  // all ranks, before the first step.
  void set_micro_batches(int64_t num_micro_batches) {
    num_micro_batches_ = num_micro_batches;
    lateness_.warn_above(std::numeric_limits<double>::infinity(), 0.0);  // ranks may have unequal parts of a step
  }

  // Sets whether ranks join. If they do, the mean is over those that have not run out of gradients. `states` describes
  // what they share at the end, and has to be equal on all.
  void set_joining(bool is_joining, std::string states);
  // Notes that this rank has run out.
  void run_out() { weight_.set_active(false); }
  // See Weight::num_active.
  double num_active() { return weight_.num_active(); }

  // From now on steps may be rolled back, and each rank adds a signal to each step.
  void make_revocable();
  // Sets the signal of the next step, and returns that step's number.
  int64_t set_signal(float signal);
  // The sum of the newest step's signals; nan if a rank has failed in that step. Unset if there was no step since
  // set_signal.
  std::optional<double> signals() const { return signal_.sum(); }

  // How long the other ranks wait for each one.
  Lateness& lateness() { return lateness_; }

  void set_buffers(ModelBuffers::Calls calls) { buffers_.set(std::move(calls)); }
  // Lets the ranks have the same gradients in the first step.
  void expect_same_data() { stamps_.expect_same_data(); }

  // Whether the gradients are still those that the newest step left.
  bool gradients_are_unchanged();
  // The parameters whose gradients hold something that only this rank has, of a backward after the newest step.
  std::vector<at::Tensor> with_own_gradients();

  // How often each parameter's gradient was written to since the newest step, see Snapshot::num_writes.
  std::vector<int64_t> num_writes();

  // Takes over the state of the gradients from another engine of the same parameters.
  void take_over(Synchronizer& other);

  // ---- with shards, see Note [Shards] ----

  // Has ranks keep shards of the means, which are dense, from the first step on.
  void set_shards(std::shared_ptr<ShardGroup> shards);
  // Does so for ranks that share no memory. The ranks must have agreed.
  void set_shards_apart();
  // The description of what ranks do with their shards, which has to be equal on all of them. Empty without shards.
  void set_optimizer(std::string description);
  Shards& shards() { return shards_; }

  // Tells whether it is the first of its sequences, see Note [Order of engines].
  void set_first(bool is_first) { is_first_ = is_first; }

 private:
  friend class Step;  // works on what lasts

  void before_gradient(size_t index) override;
  void after_gradient(size_t index, const at::Tensor& parameter, bool is_gone) override;
  void take_hooks_off();
  void wait_for_backward(const char* caller) const;
  void end_backwards(const char* caller);
  void put_sums_back(bool only_lone_ones);

  static void for_each_interrupted(const std::function<void(Synchronizer&)>& call);
  static void send_leftovers();
  static void abandon_interrupted();
  static void finalize_backward(int graph_task);

  void begin();
  void send_rest();
  void fail_and_send_rest();
  void abandon();
  std::unique_ptr<Step> end();

  bool sums() const { return op_ == Op::kSum; }
  bool have_agreed() const { return EngineState::have_agreed(*agreement_, compressions_); }
  c10::Device device_to_agree_on() const;
  void agree_and_lay_out();
  void lay_out();
  void forget_layout_if_changed(const std::vector<Gradient>& gradients);

  const int64_t bucket_cap_bytes_;
  const Op op_;
  const std::shared_ptr<Agreement> agreement_;  // on all buckets
  std::vector<Parameter> parameters_;
  Layout layout_;  // made in the first step

  Weight weight_;
  GradientFlags flags_;
  Signal signal_{*liveness_};
  UsedParameters used_parameters_{flags_, /*is_on=*/op_ == Op::kMeanOfUsed};
  ModelBuffers buffers_;
  NamedValues named_;
  Shards shards_{*this, parameters_, layout_, flags_};
  Lateness lateness_{buckets_.times(), *group_};
  Stamps stamps_{*this, agreement_};
  SideValues side_values_{
      {&flags_, &signal_, &shards_, &used_parameters_, &buffers_, &named_, &weight_, &lateness_, &stamps_}};

  int64_t num_micro_batches_ = 0;           // 0 without them
  std::string optimizer_;                   // what the ranks do with shards; empty without
  std::string states_;                      // what the ranks share at the end of join(); empty outside
  int64_t weighted_step_ = -1;              // the step that the weight was set for
  std::unique_ptr<Step> step_;              // the step under way; null if there is none
  std::atomic<bool> is_under_way_ = false;  // whether there is a step, for other threads

  const bool is_on_cpu_;                              // whether all its parameters are
  std::atomic<bool> is_first_ = false;                // whether it is the first of its sequences
  Backward backward_;                                 // the owner of the step under way
  std::vector<std::shared_ptr<GradientHook>> hooks_;  // one for each parameter, while attached
  bool overlaps_ = false;                             // whether hooks send gradients while backward goes on
  bool is_enabled_ = true;
};

}  // namespace fastsync
