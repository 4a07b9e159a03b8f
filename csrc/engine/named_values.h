// Named float32 tensors that travel beside the gradients, to be averaged: what users piggyback, and buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace fastsync {

// A name has slots once the ranks have agreed on it, and keeps them. A rank that sends nothing under a name leaves its
// slots empty, as nan, so that what is sent does not change.
class NamedValues {
 public:
  using Tensors = std::map<std::string, at::Tensor>;

  // For the next sync, in place of an earlier one of that name.
  void put(const std::string& name, at::Tensor value);
  bool has_slots(const std::string& name, const at::Tensor& value) const;
  // Lines that the ranks have to agree on: all that wait and have no slots, or slots of another shape.
  std::string newcomers() const;
  // Then they get slots.
  void make_slots();

  // Returns what a sync sends, flat, on the device. counts: whether this rank's values count in the means. A rank that
  // has failed leaves all slots empty. Throws c10::ValueError if a CUDA graph is captured that would repeat the value
  // of one of them.
  std::vector<at::Tensor> to_send(bool counts, bool has_failed, c10::Device device);
  // Splits sums over the ranks, or means made of them. Returns those under names that this rank has sent.
  Tensors by_name(const at::Tensor& sums) const;

 private:
  at::Tensor slots_of(const std::string& name, at::IntArrayRef shape, bool counts, c10::Device device) const;

  std::map<std::string, std::vector<int64_t>> slots_;  // their shapes
  Tensors waiting_;                                    // for the next sync
  Tensors sent_;                                       // by the newest one
  std::set<std::string> given_in_graph_;               // by a CUDA graph itself, anew in each replay
};

}  // namespace fastsync
