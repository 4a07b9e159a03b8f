// A ParameterSync averages the gradients of a set of parameters, step after step. It knows nothing of autograd. Methods
// are not thread-safe unless their comments say so.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine_state.h"
#include "engine/step.h"

namespace fastsync {

class ParameterSync {
 public:
  // The names, one for each parameter, are for errors. `sparse` has the names of the parameters whose gradients are
  // sparse, which go with the mean over all ranks alone. The engine must outlive this object.
  ParameterSync(EngineState& engine, const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                int64_t bucket_cap_bytes, Op op, const std::set<std::string>& sparse);

  // Makes the ranks agree. Throws c10::ValueError if they differ in parameters or settings. The first step calls it, if
  // nobody did. With init_sync, all ranks take over the parameters of one rank after it.
  void agree(bool init_sync);

  // ---- between steps ----

  // Notes that an optimizer has updated the parameters. Any thread may call it.
  void note_update() { context_.agreement->step_check.note_update(); }

  // Has the next step average a float32 tensor. It replaces an earlier one of that name.
  void piggyback(const std::string& name, const at::Tensor& value);
  // The means of the tensors that were piggybacked on the newest step.
  const NamedValues::Tensors& piggybacked() { return context_.means; }

  // Sets the weight of this rank's gradients from the next step on. The first call has to come before the same step on
  // all ranks. Throws c10::Error if the step has gradients already, because another weight may be meant for them. With
  // have_hooks, hooks mark new gradients, so only the marks have to be read.
  void set_weight(double weight, bool have_hooks);

  // Sets whether ranks join. If they do, the mean is over those that have not run out of gradients. `states` describes
  // what they share at the end, and has to be equal on all.
  void set_joining(bool is_joining, std::string states);
  // Notes that this rank has run out.
  void run_out() { context_.weight.set_active(false); }
  // The number of ranks that had not run out in the newest step; nan if one has failed. Waits for the device.
  double num_active();

  // From now on steps may be taken back, see EngineState::make_revocable, and each rank adds a signal to each step.
  void make_revocable();
  // Sets the signal of the next step, and returns that step's number.
  int64_t set_signal(float signal);
  // The sum of the newest step's signals; nan if a rank has failed in that step. Unset if there was no step since
  // set_signal.
  std::optional<double> signals() const { return context_.signals; }

  void set_buffers(ModelBuffers buffers) { context_.buffers = std::move(buffers); }

  // Whether the gradients are still those that the newest step left.
  bool gradients_are_unchanged();
  // The parameters whose gradients hold something that only this rank has, of a backward after the newest step.
  std::vector<at::Tensor> with_own_gradients(bool have_hooks);

  // ---- with shards, see Note [Shards] ----

  // Has ranks keep shards of the means, which are dense, from the first step on.
  void set_shards(std::shared_ptr<Meeting> shards);
  // Does so for ranks that share no memory. The ranks must have agreed.
  void set_shards_apart();
  // The description of what ranks do with their shards, which has to be equal on all of them. Empty without shards.
  void set_optimizer(std::string description);
  // Lets the ranks have the same gradients in the first step.
  void expect_same_data() { context_.expects_same_data = true; }
  // A piece of a parameter's means: the parameter's index, the piece's first value, and the means.
  using Piece = std::tuple<size_t, int64_t, at::Tensor>;
  // This rank's pieces. They stay in the same memory from step to step, until their number is another.
  std::vector<Piece> pieces();
  int64_t pieces_number();
  // Which values each rank has: a parameter's index, the first value, and how many. By bucket, and by rank.
  using Place = std::tuple<size_t, int64_t, int64_t>;
  std::vector<std::vector<std::vector<Place>>> places();
  // Which parameters have means of the newest step, by parameter.
  std::vector<bool> have_means() { return context_.have_means; }
  // How often each parameter's gradient was written to since the newest step, see Snapshot::num_writes.
  std::vector<int64_t> num_writes();
  // Whether each parameter's gradient has other values than the newest step has left, by Note [Sampled gradients].
  std::vector<bool> have_other_values();
  // Waits until all ranks are here. Returns the numbers that each of them gives, by rank. `what` is for errors.
  std::vector<std::vector<double>> compare(const std::vector<double>& numbers, const std::string& what);
  // Waits until all ranks have come here.
  void meet();

  // Takes over the state of the gradients from another engine of the same parameters.
  void take_over(ParameterSync& other);

  // ---- around a gradient, with or without a step ----

  std::vector<Parameter>& parameters() { return context_.parameters; }
  bool sums() const { return context_.op == Op::kSum; }
  // Puts back the sums that were put aside. With only_lone_ones, it skips parameters that have got a gradient since.
  void put_sums_back(bool only_lone_ones);

  // ---- one step: see Note [Steps] ----

  bool is_under_way() const { return is_under_way_; }  // any thread may call it
  void begin();
  // These need a step that is under way.
  void mark_ready(size_t index) { step_->mark_ready(index); }
  void mark_all_ready() { step_->mark_all_ready(); }
  void join_streams() const noexcept { step_->join_streams(); }
  void send_full_buckets() { step_->send_full_buckets(); }
  // Throws c10::ValueError if the step is refused, which happens on all ranks. Then it is over.
  void send_rest();
  // Makes the step fail, and sends what is left of it as nan. See Note [Steps].
  void fail_and_send_rest();
  // Waits for the means, and hands them out. The step is over afterwards, even if it throws.
  void receive();
  // Calls fail_and_send_rest and receive.
  void abandon();

 private:
  bool have_agreed() const { return context_.engine.have_agreed(*context_.agreement, context_.engine.compressions()); }
  c10::Device device_to_agree_on() const;
  void agree_and_lay_out();
  void lay_out();
  void forget_layout_if_changed(const std::vector<Gradient>& gradients);
  std::unique_ptr<Step> end();

  const int64_t bucket_cap_bytes_;
  std::string optimizer_;  // what the ranks do with shards; empty without
  std::string states_;     // what the ranks share at the end of join(); empty outside
  StepContext context_;
  int64_t weighted_step_ = -1;              // the step that the weight was set for
  std::unique_ptr<Step> step_;              // the step under way; null if there is none
  std::atomic<bool> is_under_way_ = false;  // whether there is a step, for other threads
};

}  // namespace fastsync
