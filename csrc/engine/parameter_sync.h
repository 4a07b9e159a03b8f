// All gradients of a set of parameters: which bucket each goes into, when a bucket may be sent, what travels for a
// parameter that has no gradient here, and what rides along. Knows nothing of autograd; not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/bucket_sync.h"
#include "engine/pairing.h"
#include "engine/parameter_residuals.h"
#include "engine/parameter_scales.h"
#include "engine/riders.h"
#include "engine/sync_times.h"
#include "transport/roll_call.h"

namespace fastsync {

class ParameterSync {
 public:
  // The names, one for each parameter, are for errors.
  ParameterSync(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes);

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
  void note_update() { pairing_.note_update(); }

  // Between syncs, on all ranks between the same ones. They check anew that they agree.
  void set_schedule(std::shared_ptr<const Schedule> schedule);

  // Raises c10::ValueError where the ranks differ in parameters or settings. The first sync does it, if nobody did.
  void agree();

  // A float32 tensor to be averaged with the next sync, in place of an earlier one of that name.
  void ride(const std::string& name, const at::Tensor& value) { riders_.add(name, value); }
  // The averages that came with the newest sync.
  const Riders::Tensors& riders() const { return riders_.means(); }

  // float64 [number of buckets, kNumStats], of the newest sync.
  at::Tensor grad_stats();
  SyncTotals totals();
  int64_t num_steps() const { return num_steps_; }
  // Whether the newest sync is part of a CUDA graph, whose replays nobody counts here.
  bool is_captured() const { return is_captured_; }

  // The number of the next step: what the schedule and the rounding go by.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }
  // Whether the gradients are still those that the newest sync left.
  bool gradients_are_unchanged() const;

  // The fp16 scale of each parameter's bucket, for checkpoints. Waits for the device.
  std::vector<ParameterScale> scales();
  void set_scales(const std::vector<ParameterScale>& scales);

  // What error feedback has not sent yet. Every rank has others.
  std::vector<ParameterResidual> residuals() const;
  void set_residuals(const std::vector<ParameterResidual>& residuals);

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  struct Parameter {
    Parameter(const at::Tensor& tensor, std::string name) : id(tensor.getIntrusivePtr()), name(std::move(name)) {}

    ParameterId id;
    std::string name;
    at::Tensor tensor;  // while a sync is under way
    size_t bucket = kNone;
    size_t place = 0;   // among all parameters in the buckets, in their order
    int64_t numel = 0;  // this and the next two: what the layout was made for
    at::ScalarType dtype = at::kFloat;
    c10::Device device = c10::kCPU;
    bool is_new = false;
    bool is_ready = false;
    std::optional<c10::Stream> stream;  // on which its gradient got ready, where there are streams
    bool repeats = false;               // gets more than one gradient in a backward: final only at its end
    at::Tensor stand_in;  // what travels where the gradient is missing or lies otherwise than the parameter
    std::optional<ParameterId> averaged;  // the newest sync's gradient and its version
    uint32_t averaged_version = 0;
  };

  struct Bucket {
    std::vector<size_t> parameters;
    std::vector<ParameterId> ids;
    int64_t numel = 0;  // real values
    size_t num_waiting = 0;
    std::shared_ptr<BucketSync> sync;
    std::shared_ptr<BucketSync::Flight> flight;
    bool took_back = false;  // something that unpacking has counted
  };

  bool takes_part(const Parameter& parameter) const;
  std::string layout_change() const;
  void prepare();
  void lay_out();
  void forget_layout();
  void agree_anew(std::string why);
  void wait_for_ranks(const char* what, const std::function<void()>& call);
  std::vector<int64_t> order_of_rank_0(const std::vector<size_t>& taking_part);

  void check(const Parameter& parameter) const;
  void wait_for_gradients(const Bucket& bucket) const;
  bool may_send_next() const;
  bool waits_to_send(const Bucket& bucket) const;
  void send_next();
  void send_poisoned();
  void send(Bucket& bucket, std::vector<at::Tensor> grads, bool is_poisoned, const std::vector<bool>& stand_in = {});
  at::Tensor gradient_to_send(Parameter& parameter);
  at::Tensor flags();
  void begin_pairing();
  void check_pairing();
  void renew_stamp(c10::Device device);
  void hand_out();
  void take_back(Parameter& parameter);
  void measure_what_was_handed_out();
  bool some_rank_has(const Parameter& parameter);
  void warn_of_waiting() const;
  void end();

  std::vector<Parameter> parameters_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Whereabouts> whereabouts_;
  int64_t bucket_cap_bytes_;
  std::shared_ptr<const Schedule> schedule_;
  int tag_ = 0;  // of the first bucket's messages

  bool is_laid_out_ = false;
  bool have_agreed_ = false;
  std::string why_agree_ = "it is new";
  std::vector<Bucket> buckets_;
  ParameterScales saved_scales_;
  ParameterResiduals saved_residuals_;
  ForgottenTotals forgotten_totals_;

  std::atomic<bool> is_under_way_ = false;
  std::vector<size_t> order_;  // in which gradients got ready, while there is no layout
  size_t next_bucket_ = 0;
  std::vector<float> presence_;  // by place: 1 where this rank has a gradient
  std::vector<float> flagged_;   // what flags_ holds
  at::Tensor flags_;
  std::vector<at::Tensor> captured_flags_;  // which CUDA graphs go on reading
  at::Tensor counts_;      // of the ranks that have a gradient, by place; undefined until it is looked at
  int64_t num_waits_ = 0;  // in a row, of the host for the device

  int64_t engine_ = -1;  // a number that the ranks have agreed on
  Pairing pairing_;
  std::vector<float> stamp_;  // of pairing_, as it was sent last
  bool has_new_stamp_ = false;
  int64_t num_stamps_ = 0;

  Riders riders_;
  int64_t num_steps_ = 0;
  int64_t step_ = 0;
  bool is_captured_ = false;
  SyncTimes times_;
  Strand strand_;
};

}  // namespace fastsync
