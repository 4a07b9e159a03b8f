// The way in past DDP: hooks on the gradient accumulators tell which gradients are ready, full buckets are sent while
// backward goes on, and the end of backward waits for them. No Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/backward.h"
#include "engine/gradient_hook.h"
#include "engine/parameter_sync.h"

namespace fastsync {

// Must be owned by a shared_ptr. The lock is held by one engine at a time, also while it waits for other ranks. One
// thread at a time may run backwards through it.
class Synchronizer : public ParameterSync, public std::enable_shared_from_this<Synchronizer> {
 public:
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums);
  ~Synchronizer() override;

  // Puts hooks on the parameters, which are those it was made for: frozen ones too, which may be unfrozen later. From
  // then on the parameters live as long as this does, until detach. Not inside a backward. Without overlap only what
  // comes after a sum is told apart from it, and nothing is sent before synchronize.
  void attach(const std::vector<at::Tensor>& parameters, bool overlap);
  void detach();

  // While disabled, backward leaves gradients to accumulate.
  void set_enabled(bool enabled) { is_enabled_ = enabled; }

  // Averages every gradient there is, now. On a CPU it waits, on CUDA the current stream does.
  void synchronize();

  // Waits for other ranks, on a CPU. Inside another backward it does nothing.
  void end_interrupted() override;

 private:
  void before_gradient(size_t index);
  void on_gradient(size_t index, bool is_gone);
  void take_hooks_off();
  void wait_for_backward(const char* caller) const;
  bool may_send_early() const;

  static void of_each_interrupted(const std::function<void(Synchronizer&)>& call);
  static void send_leftovers();
  static void abandon_interrupted();
  static void finish(int graph_task);

  const bool is_on_cpu_;
  const void* const sequence_;
  Backward backward_;                                 // that the sync under way belongs to
  std::vector<std::shared_ptr<GradientHook>> hooks_;  // one for each parameter, while attached
  bool overlaps_ = true;
  bool is_enabled_ = true;
};

}  // namespace fastsync
