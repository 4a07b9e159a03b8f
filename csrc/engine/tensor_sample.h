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

// Values of one tensor.
struct SampledValues {
  at::ScalarType dtype = at::kFloat;
  std::string bytes;  // empty if there are none
};

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
  // Returns a text of the values, as it travels. Waits for those of a device.
  std::string text();

 private:
  std::string which_;                                        // '1' or '0' for each tensor
  std::vector<SampledValues> values_;                        // by tensor
  std::vector<std::pair<size_t, at::Tensor>> on_their_way_;  // tensors, and what comes of them from a device
  std::vector<c10::Event> have_come_;
};

// Has ranks of a group tell each other a text through the group's store, and returns the texts. Returns none if the
// store cannot be used, or if a text does not come in time. Each of the ranks has to call it, others may; only its own
// text is not empty. The key must be new. `old_key` is one that no rank reads any more, or empty.
std::optional<std::vector<std::string>> tell_in_store(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const std::vector<int64_t>& ranks, const std::string& key,
                                                      const std::string& own, std::chrono::seconds limit,
                                                      const std::string& old_key = "");

// Describes which ranks have which text, as in "rank 0, 2: avx2; rank 1: avx512".
std::string who_has(const std::vector<int64_t>& ranks, const std::vector<std::string>& texts);

// What ranks have found out about their samples.
struct SampleDifference {
  std::string what;          // the first tensor that differs, and which ranks have the same values; empty if none does
  bool is_rounding = false;  // whether no tensor differs by more than roundings may
};

// Compares samples of some ranks in that way. `own` is the text of this rank's sample; empty if it is none of them.
std::optional<SampleDifference> find_difference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                const std::vector<int64_t>& ranks, const std::string& key,
                                                const std::vector<std::string>& names, const std::string& own,
                                                std::chrono::seconds limit, const std::string& old_key = "");

// Compares a sample of the gradients of these parameters over all ranks of a group, which all have to call it in the
// same order. Returns the first that differs, as find_difference does. Waits for the device.
std::optional<std::string> compare_gradients(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             const std::vector<at::Tensor>& parameters,
                                             const std::vector<std::string>& names);

}  // namespace fastsync
