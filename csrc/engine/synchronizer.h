// The way in past DDP: hooks on the gradient accumulators tell which gradients are ready, full buckets are sent while
// backward goes on, and the end of backward waits for them. No Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/backward.h"
#include "engine/gradient_hooks.h"
#include "engine/parameter_sync.h"

namespace fastsync {

// Must be owned by a shared_ptr. Any thread may read what it tells; one at a time may run backwards through it.
class Synchronizer : public std::enable_shared_from_this<Synchronizer> {
 public:
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums = false);
  ~Synchronizer();

  // Puts hooks on the parameters, which are those it was made for: frozen ones too, which may be unfrozen later. From
  // then on the parameters live as long as this does, until detach. Not inside a backward.
  void attach(const std::vector<at::Tensor>& parameters);
  void detach();

  // While disabled, backward leaves gradients to accumulate.
  void set_enabled(bool enabled);

  // Averages every gradient there is, now. On a CPU it waits, on CUDA the current stream does.
  void synchronize();

  // Ends the step of a backward that failed, if there is one. Waits for other ranks, on a CPU. Inside another backward
  // it does nothing.
  void end_interrupted();

  // An optimizer has updated the parameters.
  void note_update() { sync_.note_update(); }

  // Calls a method of ParameterSync, while nobody else does.
  template <class Method, class... Args>
  auto locked(Method method, Args&&... args) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::invoke(method, sync_, std::forward<Args>(args)...);
  }

 private:
  void before_gradient(size_t index);
  void lose_hooks(size_t index);
  void on_gradient(size_t index, bool was_given);
  void take_hooks_off();

  void wait_for_backward(const char* caller) const;
  void begin();
  bool may_send_early() const;

  template <class Call>
  static void of_each_interrupted(const Call& call);
  static void send_leftovers();
  static void abandon_interrupted();
  static void finish(int graph_task);

  const bool is_on_cpu_;
  const void* const sequence_;
  const int process_id_;
  Backward backward_;  // that the sync under way belongs to

  std::mutex mutex_;  // guards what follows; held by one engine at a time, also while it waits for other ranks
  ParameterSync sync_;
  GradientHooks hooks_;  // on from attach until detach
  bool is_enabled_ = true;
  std::exception_ptr leftover_error_;  // of a sync that has ended, for the next one to throw
};

}  // namespace fastsync
