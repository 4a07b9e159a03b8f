// The entry point attach synchronises gradients during backward. Hooks on the gradient accumulators tell which
// gradients are ready. Full buckets are sent while backward goes on, and the end of backward waits for them. It touches
// no Python object, and runs without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "engine/backward.h"
#include "engine/gradient_hook.h"
#include "engine/parameter_sync.h"

namespace fastsync {

// Must be owned by a shared_ptr. It holds its lock even while it waits for other ranks. Only one thread at a time may
// run backwards of its parameters.
class Synchronizer : public EngineState, public std::enable_shared_from_this<Synchronizer> {
 public:
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, Op op,
               const std::set<std::string>& sparse);
  ~Synchronizer() override;

  // Puts hooks on the parameters, which must be those of the constructor. Frozen ones get hooks, too, because they may
  // be unfrozen later. The parameters live as long as this object, until detach. Do not call it inside a backward.
  // Without overlap, nothing is sent before synchronize. Then there are hooks only for op="sum", see Note [Sums].
  void attach(const std::vector<at::Tensor>& parameters, bool overlap);
  void detach();

  // While the engine is disabled, backward lets gradients accumulate.
  void set_enabled(bool enabled) { is_enabled_ = enabled; }

  void set_weight(double weight) { sync_.set_weight(weight, overlaps_); }
  std::vector<at::Tensor> with_own_gradients() { return sync_.with_own_gradients(overlaps_); }

  ParameterSync& sync() { return sync_; }

  // Averages every gradient that there is. On a CPU it waits, on CUDA the current stream waits.
  void synchronize();

  // Ends the step of a backward that has failed, if there is one. It sends what other ranks wait for, and takes part in
  // what they send.
  void abandon_step();

  // Ends the interrupted steps of all engines. On a CPU it waits for other ranks. Inside a backward it does nothing.
  void end_interrupted() override;

 private:
  class Attached;

  void before_gradient(size_t index);
  void on_gradient(size_t index, const at::Tensor& parameter, bool is_gone);
  void take_hooks_off();
  void wait_for_backward(const char* caller) const;
  void end_backwards(const char* caller);

  static void for_each_interrupted(const std::function<void(Synchronizer&)>& call);
  static void send_leftovers();
  static void abandon_interrupted();
  static void finish(int graph_task);

  ParameterSync sync_;
  const bool is_on_cpu_;                      // whether all its parameters are
  const std::vector<const void*> sequences_;  // engines of one sequence must call in the same order on all ranks
  std::atomic<bool> is_first_ = false;        // whether it is the first of them, see Note [Order of engines]
  Backward backward_;                         // the owner of the step under way
  std::vector<std::shared_ptr<GradientHook>> hooks_;  // one for each parameter, while attached
  bool overlaps_ = false;                             // whether hooks send gradients while backward goes on
  bool is_enabled_ = true;
};

}  // namespace fastsync
