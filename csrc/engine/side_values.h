// Side values travel beside the gradients of a step's last bucket. They are one vector of float32, which is summed over
// the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/gradient_flags.h"
#include "engine/named_values.h"

namespace fastsync {

// The vector holds the flags, then the step check's stamp, then the signal, then the users, then the named values.
class SideValues {
 public:
  GradientFlags flags;
  NamedValues named;
  // Whether each rank adds its weight for each parameter that it has a new gradient of. The mean over all ranks has the
  // weight of the number of ranks.
  bool counts_users = false;
  // A number that each rank adds in each step, nan if it has failed. Unset if nobody asks for it; then it is not sent.
  std::optional<float> signal;

  // Returns the vector, on the device. Without a new stamp the one before is sent again, and stamps() returns nothing.
  // The weight is float64 [1], and undefined if it is 1. See NamedValues::to_send for the rest.
  at::Tensor to_send(std::optional<std::vector<float>> stamp, const at::Tensor& weight, bool counts, bool has_failed,
                     c10::Device device);
  // Takes the sums over the ranks. They may lie in memory that the next sync writes to.
  void arrive(const at::Tensor& sums, bool is_captured);
  // The sums of the stamps; undefined if no new ones were sent.
  at::Tensor stamps() const;
  // The sum of the signals, which must be set. Waits for the device.
  double signals() const;
  // The sums of the flags and, by flag, of the weights of the ranks with a new gradient.
  at::Tensor flag_sums() const { return sums_.narrow(0, 0, num_flags()); }
  at::Tensor user_sums() const { return sums_.narrow(0, num_fixed(), num_users()); }
  // The sums of the named values.
  at::Tensor named_sums() const {
    const int64_t begin = num_fixed() + num_users();
    return sums_.narrow(0, begin, sums_.numel() - begin);
  }

 private:
  at::Tensor fixed(bool has_failed, c10::Device device);
  int64_t num_flags() const { return static_cast<int64_t>(flags.values().size()); }
  int64_t num_users() const { return counts_users ? num_flags() : 0; }
  int64_t num_fixed() const { return num_flags() + static_cast<int64_t>(stamp_.size()) + (signal ? 1 : 0); }

  std::vector<float> stamp_;
  bool has_new_stamp_ = false;
  std::vector<float> fixed_;  // the flags, the stamp and the signal that fixed_on_device_ holds
  at::Tensor fixed_on_device_;
  at::Tensor sums_;
};

}  // namespace fastsync
