// Named values are float32 tensors that users piggyback on a step's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/passenger.h"

namespace fastsync {

// A name has slots once the ranks have agreed on it, and keeps them. A rank that sends nothing under a name leaves its
// slots empty, as nan, so that what is sent does not change.
class NamedValues final : public Passenger {
 public:
  using Tensors = std::map<std::string, at::Tensor>;

  // Puts a value into the next sync. It replaces an earlier value of that name.
  void put(const std::string& name, at::Tensor value);
  bool has_slots(const std::string& name, const at::Tensor& value) const;

  // A line for each waiting value that has no slot, or one of another shape.
  std::string news() const override;
  // Gives all waiting values slots.
  void note_agreed() override;
  // A rank that has failed leaves all slots empty. Throws c10::ValueError if a CUDA graph is captured that would repeat
  // one value in each replay.
  void add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) override;
  void take(const Sums& sums, const StepInfo& step) override;
  // The means of the newest step, under the names that this rank has sent.
  const Tensors& means() const { return means_; }

 private:
  at::Tensor slots_of(const std::string& name, at::IntArrayRef shape, bool counts, c10::Device device) const;

  std::map<std::string, std::vector<int64_t>> slots_;  // the shape of each name's slots
  Tensors waiting_;                                    // values for the next sync
  Tensors sent_;                                       // values of the newest sync
  Tensors means_;
  std::set<std::string> given_in_graph_;  // names whose values each replay of a CUDA graph gives anew
};

}  // namespace fastsync
