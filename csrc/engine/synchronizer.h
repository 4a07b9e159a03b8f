// The way in past DDP: hooks on the gradient accumulators tell which gradients are ready, full buckets are sent while
// backward goes on, and the end of backward waits for them. No Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/parameter_sync.h"

namespace fastsync {

// Must be owned by a shared_ptr. Any thread may read what it tells; one at a time may run backwards through it.
class Synchronizer : public std::enable_shared_from_this<Synchronizer> {
 public:
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes);
  ~Synchronizer();

  // Puts hooks on the parameters, which are those it was made for: frozen ones too, which may be unfrozen later. From
  // then on the parameters live as long as this does, until detach. Not inside a backward.
  void attach(const std::vector<at::Tensor>& parameters);
  void detach();

  // While disabled, backward leaves gradients to accumulate.
  void set_enabled(bool enabled);

  // Averages every gradient there is, now. On a CPU it waits, on CUDA the current stream does.
  void synchronize();

  // See ParameterSync.
  void set_schedule(std::shared_ptr<const Schedule> schedule);
  int64_t step();
  void set_step(int64_t step);
  std::vector<ParameterResidual> residuals();
  void set_residuals(const std::vector<ParameterResidual>& residuals);
  void agree();
  void note_update() { sync_.note_update(); }
  void ride(const std::string& name, const at::Tensor& value);
  Riders::Tensors riders();
  at::Tensor grad_stats();
  SyncTotals totals();
  int64_t num_steps();
  bool is_captured();
  bool gradients_are_unchanged();
  std::vector<ParameterScale> scales();
  void set_scales(const std::vector<ParameterScale>& scales);

 private:
  void before_gradient(size_t index);
  void take_hooks_off();

  void on_gradient(size_t index, bool was_given);
  void check_not_forked() const;
  void wait_for_backward(const char* caller) const;
  void begin();
  void call_at_the_end_of_backward();
  void on_backward_end(int graph_task);
  bool outer_backward_will_call();
  bool may_send_early() const;
  struct Backward;
  std::shared_ptr<Backward> new_owner(int graph_task);
  bool is_interrupted() const;
  bool ends_with(int graph_task) const;

  template <class Call>
  static void of_each_interrupted(const Call& call);
  static void send_leftovers();
  static void abandon_interrupted();
  static void finish(int graph_task);

  const void* lane_;  // see lane_of
  bool is_on_cpu_;
  int process_id_;

  std::mutex mutex_;  // guards what follows; held by one engine at a time, also while it waits for other ranks
  ParameterSync sync_;
  std::vector<at::Tensor> hooked_;  // the parameters, from attach until detach
  bool is_enabled_ = true;
  std::exception_ptr leftover_error_;  // of a sync that has ended, for the next one to throw

  // Other threads ask whose backward is under way. If they had to wait until this one's ranks have met, ranks on which
  // threads come in different orders would wait for each other: so this is never held while anything waits.
  mutable std::mutex owner_mutex_;
  std::weak_ptr<void> owner_;  // expires when the backward under way does, ended or not: whoever will end it holds it
  int graph_task_ = -1;        // the newest that will call on_backward_end
};

}  // namespace fastsync
