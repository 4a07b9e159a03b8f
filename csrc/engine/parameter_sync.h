// Averages the gradients of a set of parameters, step after step. It knows nothing of autograd. Methods are not
// thread-safe unless their comments say so.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_state.h"
#include "engine/step.h"

namespace fastsync {

class ParameterSync {
 public:
  // The names, one for each parameter, are for errors. sums: gradients become the sum over the ranks and not the mean.
  // The engine outlives this.
  ParameterSync(EngineState& engine, const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                int64_t bucket_cap_bytes, bool sums);

  // Throws c10::ValueError if the ranks differ in parameters or settings. The first step calls it, if nobody did.
  // init_sync: all ranks take over the parameters of one after that.
  void agree(bool init_sync);

  // ---- between steps ----

  // An optimizer has updated the parameters. From any thread.
  void note_update() { context_.agreement->step_check.note_update(); }

  // A float32 tensor to be averaged with the next step, in place of an earlier one of that name.
  void piggyback(const std::string& name, const at::Tensor& value);
  // The averages that came with the newest step.
  const NamedValues::Tensors& piggybacked() { return context_.means; }

  // This rank's gradients count so much from the next step on. The first call has to come before the same step on all
  // ranks. Throws c10::Error if the step has gradients already, which another weight may be meant for. have_hooks:
  // hooks mark what is new, so that nothing but their marks has to be read.
  void set_weight(double weight, bool have_hooks);

  // While ranks join, the mean is over those that have not run out of gradients.
  void set_joining(bool is_joining);
  void run_out() { context_.weight.run_out(); }
  // The number of ranks that had not run out in the newest step; nan if one has failed. Waits for the device.
  double num_active();

  void set_buffers(ModelBuffers buffers) { context_.buffers = std::move(buffers); }

  // Whether the gradients are still those that the newest step left.
  bool gradients_are_unchanged();
  // The parameters whose gradients hold something of a backward after the newest step, which is this rank's own.
  std::vector<at::Tensor> with_own_gradients(bool have_hooks);

  // Continues with what another engine of the same parameters knows of their gradients.
  void take_over(ParameterSync& other);

  // ---- around a gradient, with or without a step ----

  std::vector<Parameter>& parameters() { return context_.parameters; }
  bool sums() const { return context_.sums; }
  // Puts back the sums that were put aside: all, or those of parameters that have no gradient since.
  void put_sums_back(bool only_lone_ones);

  // ---- one step: see Note [Steps] ----

  bool is_under_way() const { return is_under_way_; }  // from any thread
  void begin();
  // While it is under way:
  void mark_ready(size_t index) { step_->mark_ready(index); }
  void mark_all_ready() { step_->mark_all_ready(); }
  void send_full_buckets() { step_->send_full_buckets(); }
  // Throws c10::ValueError if the step is refused, which happens on all ranks. Then it is over.
  void send_rest();
  void fail();
  // The step is over afterwards, whatever is thrown.
  void receive();
  // Calls fail and receive.
  void abandon();

 private:
  bool have_agreed() const { return context_.engine.have_agreed(*context_.agreement, context_.engine.compressions()); }
  void agree_and_lay_out();
  void lay_out();
  void forget_layout_if_changed(const std::vector<Gradient>& gradients);
  std::unique_ptr<Step> end();

  const int64_t bucket_cap_bytes_;
  StepContext context_;
  int64_t weighted_step_ = -1;              // that the weight was set for
  std::unique_ptr<Step> step_;              // under way; else null
  std::atomic<bool> is_under_way_ = false;  // whether there is one, for other threads
};

}  // namespace fastsync
