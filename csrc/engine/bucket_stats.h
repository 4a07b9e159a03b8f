// The statistics of a bucket's newest sync, which its sum takes on the way, or leaves out until somebody asks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/saved_state.h"
#include "passes/workspace.h"
#include "sums/flat_gradients.h"

namespace fastsync {

class BucketStats {
 public:
  BucketStats(c10::Device device, std::shared_ptr<Workspace> workspace);

  // float64 [kNumStats] on the device, always in the same memory.
  const at::Tensor& values() const { return values_; }

  // Replaces them by those of these gradients. The largest magnitude stays, because the scale has followed it.
  void measure(const std::vector<at::Tensor>& grads);
  // Multiplies the means, in their own memory, by factors on the device, float64 [means]. Replaces the statistics so,
  // too.
  void multiply(const std::vector<at::Tensor>& means, const at::Tensor& factors);
  // Replaces them by what the shards of all ranks add up to. Returns the largest magnitude.
  double add_up(const std::vector<const double*>& of_shards);
  // The same on the device, of float64 [ranks, kNumStats]. Returns float64 [1].
  at::Tensor add_up(const at::Tensor& of_shards);

  // Notes that the newest sync has taken them, or has left out those of these means, which lie there.
  void note_taken();
  void note_left_out(const std::vector<at::Tensor>& means);
  // Takes those of the newest sync, if they were left out. Throws c10::Error if its means are no longer there.
  void take_left_out();

 private:
  FlatGradients flatten(std::vector<at::Tensor> means) const;

  const std::shared_ptr<Workspace> workspace_;
  const at::Tensor values_;
  std::mutex mutex_;  // guards the next
  // The means whose statistics were left out, and their versions; none if they were taken.
  std::optional<std::vector<std::pair<ParameterId, uint32_t>>> left_out_;
};

}  // namespace fastsync
