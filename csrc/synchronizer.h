// The way in past DDP: hooks on the gradient accumulators tell which gradients are ready, full buckets are sent while
// backward goes on, and the end of backward waits for them. No Python here, and no GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parameter_sync.h"

namespace fastsync {

// Thread-safe. Must be owned by a shared_ptr.
class Synchronizer : public std::enable_shared_from_this<Synchronizer> {
 public:
  Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
               c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes);
  ~Synchronizer();

  // Puts hooks on the parameters, which are those it was made for: frozen ones too, which may be unfrozen later. From
  // then on the parameters live as long as this does, until detach.
  void attach(const std::vector<at::Tensor>& parameters);
  void detach();

  // While disabled, backward leaves gradients to accumulate.
  void set_enabled(bool enabled);

  // Averages every gradient there is, now. On a CPU it waits, on CUDA the current stream does.
  void synchronize();

  // See ParameterSync.
  void set_wire(const std::string& wire);
  void agree();
  void ride(const std::string& name, const at::Tensor& value);
  std::map<std::string, at::Tensor> riders();
  at::Tensor grad_stats();
  SyncTotals totals();
  int64_t num_steps();
  bool gradients_are_unchanged();
  std::vector<ParameterScale> scales();
  void set_scales(const std::vector<ParameterScale>& scales);

 private:
  // What grad_accumulator returns differs between versions of torch.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  // A parameter holds its accumulator weakly: one that has hooks must be held.
  struct Hook {
    Accumulator accumulator;
    uintptr_t key;
  };

  // Those who send through one process group.
  struct Lane;
  static std::shared_ptr<Lane> lane_of(c10d::ProcessGroup* group);

  void take_hooks_off();
  void begin();
  void on_gradient(size_t index);
  void on_backward_end();
  void call_at_the_end_of_backward();
  bool outer_backward_will_call();
  bool was_interrupted() const;

  std::shared_ptr<Lane> lane_;  // its mutex guards all that follows
  ParameterSync sync_;
  std::vector<Hook> hooks_;
  bool is_enabled_ = true;
  int process_id_;

  // Expires when the backward under way does, ended or not: whatever will call on_backward_end holds it.
  std::weak_ptr<char> backward_;
  int graph_task_ = -1;  // the newest that will call on_backward_end
};

}  // namespace fastsync
