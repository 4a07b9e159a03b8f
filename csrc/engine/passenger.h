// Passengers travel beside the gradients of a step: flags, signals, buffers, and what users piggyback.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fastsync {

// What a passenger may know of the step that it travels with.
struct StepInfo {
  int64_t number;
  int64_t rank;
  int64_t num_ranks;
  bool is_weighted = false;  // whether ranks have weights
  bool is_active = true;     // whether this rank has gradients of its own
  bool has_failed = false;   // whether this rank sends nan in place of gradients

  // The others are set once the row of side values is sent.
  c10::Device device = c10::kCPU;  // the row's
  bool is_captured = false;        // whether a CUDA graph captures the step
  at::TensorList grads = {};       // those of the row's bucket
  at::Tensor weight = {};          // see WeightSum::factor
  at::Tensor active = {};          // see WeightSum::active; undefined without weights, and maybe after a failure
  at::Tensor numbers = {};         // what all passengers have added by add_numbers

  // The mean of sums over the ranks that have gradients.
  at::Tensor mean_of(const at::Tensor& sums) const {
    return active.defined() ? sums.div(active.sum().to(sums.device())) : sums.div(num_ranks);
  }
};

// The sums over the ranks of what a passenger has added. They may lie in memory that the next sync writes to.
struct Sums {
  at::Tensor row = {};
  int64_t begin = 0;
  int64_t numel = 0;

  at::Tensor tensor() const { return row.narrow(0, begin, numel); }
};

// An engine has a list of them. A step calls each method for all, in the order of the list.
class Passenger {
 public:
  virtual ~Passenger() = default;

  // Lines that the ranks have to agree on.
  virtual std::string description() const { return ""; }
  // Such lines on what is new since the ranks agreed. They come behind all other lines, because one rank alone may have
  // them.
  virtual std::string news() const { return ""; }
  // The ranks have agreed.
  virtual void note_agreed() {}
  // Whether its values are known only at the end of backward.
  virtual bool waits_for_end() const { return false; }

  // A step begins.
  virtual void begin(const StepInfo& /*step*/) {}
  // What it adds to the row, of the same length on all ranks: either numbers of the host, which are copied to the
  // device only when they change, or flat float32 tensors on the device.
  virtual void add_numbers(std::vector<float>& /*numbers*/, const StepInfo& /*step*/) {}
  virtual void add_tensors(std::vector<at::Tensor>& /*tensors*/, const StepInfo& /*step*/) {}

  // The step has failed on this rank. What is still sent and comes is for the sake of other ranks.
  virtual void fail() {}
  // After a failure, when all is sent: it does what other ranks wait for.
  virtual void leave_behind() {}
  // The sums have come, before gradients take their means. It throws if they must not.
  virtual void check(const Sums& /*sums*/, const StepInfo& /*step*/) {}
  // The gradients have taken their means, unless the step has failed.
  virtual void take(const Sums& /*sums*/, const StepInfo& /*step*/) {}
};

}  // namespace fastsync
