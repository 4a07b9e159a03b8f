// Small float32 tensors that ride along with the gradients to be averaged: who has a seat, what sits there, the means.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <string>

namespace fastsync {

// A name keeps its seat once the ranks have agreed on it, so that one that some ranks leave empty, as nan, does not
// change what is sent.
class Riders {
 public:
  using Tensors = std::map<std::string, at::Tensor>;

  // For the next sync, in place of an earlier one of that name.
  void add(const std::string& name, const at::Tensor& value);

  bool has_seat(const std::string& name, const at::Tensor& value) const;
  // The name of one that is waiting and has no seat, or another shape than its seat; null where there is none.
  const std::string* need_agreement() const;
  // Gives them seats. Raises c10::ValueError where the ranks differ.
  void agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device);
  // The same in two parts, for an agreement on more than riders.
  std::string newcomers() const;
  void seat_newcomers();

  // All seats in one vector on the device; undefined where there are none. Those who wait sit down, unless all stay
  // empty. Throws c10::ValueError where a CUDA graph is captured that would repeat the value of one of them.
  at::Tensor board(c10::Device device, bool stay_empty = false);
  // From the means over the ranks of what board returned.
  void arrive(const at::Tensor& means);

  bool have_seats() const { return !seats_.empty(); }
  // Of those who rode on the newest sync.
  const Tensors& means() const { return means_; }

 private:
  Tensors seats_;  // nan, of each one's shape, on the CPU
  Tensors waiting_;
  std::set<std::string> captured_;  // those given by the graph itself, anew in each replay
  Tensors aboard_;
  Tensors means_;
};

}  // namespace fastsync
