// Named values are float32 tensors that travel beside the gradients: tensors that users piggyback, and buffers.
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

  // Puts a value into the next sync. It replaces an earlier value of that name.
  void put(const std::string& name, at::Tensor value);
  bool has_slots(const std::string& name, const at::Tensor& value) const;
  // Lines that the ranks have to agree on: all waiting values that have no slots, or slots of another shape.
  std::string newcomers() const;
  // Gives all waiting values slots. Call it once the ranks have agreed.
  void make_slots();

  // Returns what a sync sends, flat, on the device. `counts` tells whether this rank's values count in the means. A
  // rank that has failed leaves all slots empty. Throws c10::ValueError if a CUDA graph is captured that would repeat
  // one value in each replay.
  std::vector<at::Tensor> to_send(bool counts, bool has_failed, c10::Device device);
  // Splits sums over the ranks, or their means, by name. Returns those under names that this rank has sent.
  Tensors by_name(const at::Tensor& sums) const;

 private:
  at::Tensor slots_of(const std::string& name, at::IntArrayRef shape, bool counts, c10::Device device) const;

  std::map<std::string, std::vector<int64_t>> slots_;  // the shape of each name's slots
  Tensors waiting_;                                    // values for the next sync
  Tensors sent_;                                       // values of the newest sync
  std::set<std::string> given_in_graph_;               // names whose values each replay of a CUDA graph gives anew
};

}  // namespace fastsync
