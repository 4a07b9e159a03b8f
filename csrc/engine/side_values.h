// What travels beside the gradients of a step's last bucket: one vector of float32, summed over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/gradient_flags.h"
#include "engine/named_values.h"

namespace fastsync {

// The vector is the flags, the step check's stamp, and the named values.
class SideValues {
 public:
  GradientFlags flags;
  NamedValues named;

  // Returns the vector, on the device. Without a stamp the one before takes its slots. See NamedValues::to_send.
  at::Tensor to_send(std::optional<std::vector<float>> stamp, bool counts, bool has_failed, c10::Device device);
  // The sums over the ranks have come. They may lie in memory that the next sync writes to.
  void arrive(const at::Tensor& sums, bool is_captured);
  // The sums of the stamps; undefined if none were sent.
  at::Tensor stamps() const;
  // The sums of the named values.
  at::Tensor named_sums() const { return sums_.narrow(0, num_fixed(), sums_.numel() - num_fixed()); }

 private:
  at::Tensor flags_and_stamp(c10::Device device);
  int64_t num_flags() const { return static_cast<int64_t>(flags.values().size()); }
  int64_t num_fixed() const { return num_flags() + static_cast<int64_t>(stamp_.size()); }

  std::vector<float> stamp_;
  bool has_new_stamp_ = false;
  std::vector<float> fixed_;  // what is on the device: flags and stamp
  at::Tensor fixed_on_device_;
  std::vector<at::Tensor> captured_;  // vectors that CUDA graphs go on reading
  at::Tensor sums_;
};

}  // namespace fastsync
