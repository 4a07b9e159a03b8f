// All gradients of a set of parameters: which bucket each goes into, when a bucket may be sent, what travels for a
// parameter that has no gradient here, and what is piggybacked. Knows nothing of autograd; not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_state.h"
#include "engine/parameter.h"
#include "engine/side_values.h"
#include "engine/weight.h"

namespace fastsync {

class ParameterSync : public EngineState {
 public:
  // The names, one for each parameter, are for errors. sums: the result is the sum over the ranks and not the mean.
  ParameterSync(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums);

  bool is_under_way() const { return is_under_way_; }  // from any thread

  // Raises c10::ValueError where the ranks differ in parameters or settings. The first sync does it, if nobody did.
  // init_sync: then all ranks take over the weights of one.
  void agree(bool init_sync);

  // An optimizer has updated the parameters. From any thread.
  void note_update() { agreement_->step_check.note_update(); }

  // A float32 tensor to be averaged with the next sync, in place of an earlier one of that name.
  void piggyback(const std::string& name, const at::Tensor& value);
  // The averages that came with the newest sync.
  const SideValues::Tensors& piggybacked() { return means_; }

  // From the next sync on, this rank's gradients count so much. To be called on all ranks before the same sync, at
  // first. Throws c10::Error where the sync has gradients already, which another weight may be meant for.
  // Where hooks tell of backwards, nothing but their marks has to be read.
  void set_weight(double weight, bool have_hooks);

  // While ranks join, the gradients of one that has run out of them count for nothing. The mean is over the others.
  void set_joining(bool is_joining);
  void run_out() { weight_.run_out(); }
  // How many ranks had not, in the newest sync; nan where one has failed. Waits for the device.
  double num_active() { return weight_.num_active(); }

  // A model's buffers travel with each sync, of all ranks' models or of none's. The ranks have to agree on the
  // description. The values are float32; what becomes of them follows from whether this rank is the first of those that
  // have gradients: a bool, on the device that they have to be on. arrive gets their sums over the ranks, nan where a
  // rank has failed.
  void set_buffers(std::function<std::string()> description, std::function<at::Tensor(const at::Tensor&)> values,
                   std::function<void(const at::Tensor&)> arrive);

  // Whether the gradients are still those that the newest sync left.
  bool gradients_are_unchanged();
  // The parameters whose gradients are, in part, this rank's own: of a backward after the newest sync.
  std::vector<at::Tensor> with_own_gradients(bool have_hooks);

  // Goes on with what another engine of the same parameters knows of their gradients.
  void take_over(ParameterSync& other);

 protected:
  void check_not_forked() const { EngineState::check_not_forked("call detach() in the child"); }

  const std::string& name(size_t index) const { return parameters_[index].name; }

  // One sync: begin, mark_ready for each gradient that is final, in any order and any number of them, then send_rest
  // and receive. In between, send_full_buckets sends what can be sent already; the order in which buckets are sent is
  // the same on all ranks. After the first sync the order in which rank 0's gradients got ready decides the buckets.
  void begin();
  void mark_ready(size_t index);
  void send_full_buckets();
  void send_rest();
  void receive();

  // In place of send_rest, or after it failed: backward has failed, and the sync will get no more gradients. What is
  // left to send goes as nan, so that the ranks stay in step, and one that did not fail is not misled. receive then
  // leaves the gradients alone.
  void poison();
  void abandon();  // poison and receive

  // Before backward accumulates a gradient, and afterwards.
  void put_sum_aside(size_t index) { parameters_[index].put_sum_aside(); }
  void note_gradient(size_t index) { parameters_[index].note_gradient(); }
  void leave(size_t index) { parameters_[index].mark_new(/*is_left_over=*/true); }
  bool sums() const { return sums_; }
  // Of those to which nothing has come, or of all.
  void put_sums_back(bool only_lone_ones);
  // Every parameter with a gradient takes part in the sync under way.
  void mark_all_ready();

 private:
  struct Bucket {
    std::shared_ptr<BucketSync> sync;
    std::vector<size_t> parameters;
    int64_t numel = 0;  // real values
    size_t num_waiting = 0;
    std::shared_ptr<BucketWork> work;
  };

  bool is_laid_out() const { return !buckets_.empty(); }
  bool have_agreed() const { return EngineState::have_agreed(*agreement_, compressions_); }
  void prepare();
  void lay_out();
  void forget_layout();
  std::vector<std::vector<size_t>> layout_of(const std::vector<int64_t>& order) const;
  std::vector<int64_t> order_of_rank_0();

  void wait_for_gradients(const Bucket& bucket) const;
  bool is_last(const Bucket& bucket) const { return &bucket == &buckets_.back(); }
  bool may_go_early(const Bucket& bucket) const;
  void post_weight();
  void send_next();
  at::Tensor side_values_to_send(c10::Device device, const std::vector<at::Tensor>& grads);
  void hand_out();
  void end();

  std::vector<Parameter> parameters_;
  const int64_t bucket_cap_bytes_;
  const bool sums_;
  const std::shared_ptr<Agreement> agreement_;
  std::vector<Bucket> buckets_;  // in the order in which they are sent; none while there is no layout
  SideValues side_values_;
  SideValues::Tensors means_;  // of what was piggybacked on the newest sync
  Weight weight_;
  int64_t weighted_step_ = -1;  // that the weight was set for

  std::function<std::string()> describe_buffers_;  // this and the next two: null where no buffers travel
  std::function<at::Tensor(const at::Tensor&)> buffer_values_;
  std::function<void(const at::Tensor&)> buffers_arrive_;
  std::string buffers_description_ = "broadcast_buffers False\n";

  std::atomic<bool> is_under_way_ = false;
  bool is_poisoned_ = false;
  std::vector<size_t> order_;  // in which gradients got ready, while there is no layout
  size_t next_bucket_ = 0;
};

}  // namespace fastsync
