// All gradients of a set of parameters: which bucket each goes into, when a bucket may be sent, what travels for a
// parameter that has no gradient here, and what is piggybacked. Knows nothing of autograd; not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/buffers.h"
#include "engine/engine_state.h"
#include "engine/parameter.h"
#include "engine/side_values.h"
#include "engine/weight.h"

namespace fastsync {

class ParameterSync : public EngineState {
 public:
  void check_not_forked() const { EngineState::check_not_forked("call detach() in the child"); }

  // The names, one for each parameter, are for errors. sums: the result is the sum over the ranks and not the mean.
  ParameterSync(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums);

  const std::string& name(size_t index) const { return parameters_[index].name; }

  // One sync: begin, mark_ready for each gradient that is final, in any order and any number of them, then send_rest
  // and receive. In between, send_full_buckets sends what can be sent already; the order in which buckets are sent is
  // the same on all ranks. After the first sync the order in which rank 0's gradients got ready decides the buckets.
  void begin();
  void mark_ready(size_t index);
  void send_full_buckets();
  void send_rest();
  void receive();
  bool is_under_way() const { return is_under_way_; }  // from any thread

  // Both end a sync that will get no more gradients because backward failed. What is left to send goes as nan, so that
  // the ranks stay in step, and one that did not fail is not misled. The gradients are left alone.
  void send_poisoned_rest();
  bool rest_waits() const;  // for other ranks, to agree on something
  void discard();
  void abandon();  // both at once

  // The parameter has a gradient that no sync has averaged: it will take part in the next one.
  void mark_new(size_t index) { parameters_[index].is_new = true; }
  // Every parameter with a gradient takes part in the sync under way.
  void mark_all_ready();

  // An optimizer has updated the parameters. From any thread.
  void note_update() { agreement_->step_check.note_update(); }

  // Raises c10::ValueError where the ranks differ in parameters or settings. The first sync does it, if nobody did.
  void agree();

  // A float32 tensor to be averaged with the next sync, in place of an earlier one of that name.
  void piggyback(const std::string& name, const at::Tensor& value);
  // The averages that came with the newest sync.
  const SideValues::Tensors& piggybacked() { return side_values_.means(); }

  // From the next sync on, this rank's gradients count so much. To be called on all ranks before the same sync, at
  // first.
  void set_weight(double weight);

  // While ranks join, the gradients of one that has run out of them count for nothing. The mean is over the others.
  void set_joining(bool is_joining);
  void run_out() { weight_.run_out(); }
  // How many ranks had not, in the newest sync; nan where one has failed. Waits for the device.
  double num_active() { return weight_.num_active(); }

  // Brings them together with each sync, see Buffers. On all ranks the same ones, before the first sync.
  void set_buffers(Buffers::Find find, bool means) { buffers_to_sync_.set(std::move(find), means); }

  // Whether the gradients are still those that the newest sync left.
  bool gradients_are_unchanged();

 private:
  struct Bucket {
    std::shared_ptr<BucketSync> sync;
    std::vector<size_t> parameters;
    int64_t numel = 0;  // real values
    size_t num_waiting = 0;
    std::shared_ptr<BucketWork> work;
  };

  bool is_laid_out() const { return !buckets_.empty(); }
  bool have_agreed() const { return EngineState::have_agreed(*agreement_, schedule_); }
  std::vector<at::Tensor> gradients() const;
  void prepare();
  void lay_out();
  void forget_layout();
  std::vector<std::vector<int64_t>> layout_of(const std::vector<int64_t>& order,
                                              const std::vector<size_t>& taking_part) const;
  std::vector<int64_t> order_of_rank_0(const std::vector<size_t>& taking_part);

  void wait_for_gradients(const Bucket& bucket) const;
  bool is_last(const Bucket& bucket) const { return &bucket == &buckets_.back(); }
  bool waits_to_send(const Bucket& bucket) const;
  void post_weight(bool is_poisoned = false);
  bool weight_has_come();
  void send_next(bool is_poisoned = false);
  void send(Bucket& bucket, std::vector<at::Tensor> grads, const std::vector<bool>& stand_in, bool is_poisoned);
  void begin_step_check();
  void hand_out();
  void end();

  std::vector<Parameter> parameters_;
  const int64_t bucket_cap_bytes_;
  const bool sums_;
  const std::shared_ptr<Agreement> agreement_;
  std::vector<Bucket> buckets_;  // in the order in which they are sent; none while there is no layout
  SideValues side_values_;
  Weight weight_;
  Buffers buffers_to_sync_;

  std::atomic<bool> is_under_way_ = false;
  std::vector<size_t> order_;  // in which gradients got ready, while there is no layout
  size_t next_bucket_ = 0;
};

}  // namespace fastsync
