// A TensorSample is some values of each of several tensors. By these, ranks tell whether they hold the same tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fastsync {

class TensorSample {
 public:
  // Takes evenly spaced values of each tensor. Where they begin depends on the seed. It has no values of a tensor that
  // is undefined or empty, or whose values cannot be read here: those of a subclass, which Python computes, or of one
  // whose memory was freed for a while. For values on a device the host does not wait.
  TensorSample(const std::vector<at::Tensor>& tensors, uint64_t seed);

  // Whether values of a device may not have come yet.
  bool is_on_its_way() const { return !on_their_way_.empty(); }
  // Tells which of the tensors it has values of.
  const std::string& which() const { return which_; }
  // Returns a number for each tensor, made of its values' bits. Waits for those of a device.
  std::vector<uint64_t> digests();

 private:
  std::string which_;                                        // '1' or '0' for each tensor
  std::vector<std::string> values_;                          // by tensor, as bytes
  std::vector<std::pair<size_t, at::Tensor>> on_their_way_;  // tensors, and what comes of them from a device
  std::vector<c10::Event> have_come_;
};

// Compares digests over some ranks of a group, through the group's store. Returns the first tensor that differs and
// which ranks have the same values of it; empty if none differs. Returns none if the store cannot be used, or if the
// digests of a rank do not come in time. Each of the ranks has to call it, others may. The key must be new. `own` are
// this rank's digests; empty if it is none of the ranks.
std::optional<std::string> find_difference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           const std::vector<int64_t>& ranks, const std::string& key,
                                           const std::vector<std::string>& names, const std::vector<uint64_t>& own,
                                           std::chrono::seconds limit);

}  // namespace fastsync
