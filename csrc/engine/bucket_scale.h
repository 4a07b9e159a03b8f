// The scale of a bucket: the power of two that fp16 values are multiplied with. It follows the means, which all ranks
// have, so that ranks need not agree on it in each step.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "engine/send_options.h"
#include "sums/flat_gradients.h"
#include "transport/team.h"

namespace fastsync {

class BucketScale {
 public:
  // `stats` are those of the bucket's newest sum.
  BucketScale(std::shared_ptr<const Team> ranks, at::Tensor stats);

  // The scale as one float32 element. Undefined if the next fp16 sum has to find it out.
  at::Tensor value() const { return has_value_ && !is_lost() && !largest_comes_ ? value_ : at::Tensor(); }
  // The memory of the scale, the same from step to step, see Note [Captured steps].
  const at::Tensor& memory() const { return value_; }
  void set(const at::Tensor& scale);

  // Whether begin_sum waits for the other ranks. The ranks agree on a scale in the first step, and after a step that
  // does not tell how large gradients are.
  bool needs_agreement(const Compression& compression) const {
    return compression.wire == DType::kFloat16 && (!has_value_ || is_lost());
  }
  // Gives the gradients the scale of a sum, which follows its means from then on. All of it happens on the device.
  void begin_sum(FlatGradients& gradients, const SendOptions& options);

  // After a sum of which a rank has its shard alone: follows the largest magnitude of all shards.
  void follow(double largest);
  // The same on a device, of float64 [1].
  void follow(const at::Tensor& largest);
  // The same after a reduce-scatter, whose result was the sum times the factor. The ranks tell each other the largest
  // magnitude. It does not wait: the next sum's scale follows from what comes.
  void follow_all_shards(double factor);

 private:
  bool is_lost() const;
  void agree(const FlatGradients& gradients);
  void take_largest();

  const std::shared_ptr<const Team> ranks_;
  const at::Tensor stats_;
  at::Tensor value_;
  bool has_value_ = false;
  bool has_followed_ = false;  // whether it has followed a sum since it was set
  at::Tensor sent_;            // the scale of the newest sum, if that keeps a shard or scatters, and has one
  at::Tensor largest_;         // the largest magnitude of the newest means, on all ranks once largest_comes_ has waited
  std::unique_ptr<Transfer> largest_comes_;  // null unless follow_all_shards has sent it
};

}  // namespace fastsync
