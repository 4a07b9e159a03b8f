// What a bucket's wire has not carried yet, from sum to sum: what this rank lost in packing its gradients and in
// encoding sums. Knows no network.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sums/bucket.h"

namespace fastsync {

// A residual is of one gradient and in its units. One of a sum counts in it as this rank's gradient does, so it becomes
// part of that gradient's.
class ErrorFeedback {
 public:
  // Has the bucket's passes send what is kept, and keep what they lose.
  void lend(Bucket& bucket, const std::vector<bool>& stand_in);

  // One for each gradient, undefined where nothing is kept: flat, in the order of its indices and not of its memory.
  std::vector<at::Tensor> residuals() const;
  void set_residuals(const std::vector<at::Tensor>& residuals);

  // No rank has the gradient, so what was sent of it in the newest sum has gone nowhere: what was kept before is kept
  // again.
  void take_back(size_t index);

 private:
  void lay_out(const Bucket& bucket);

  std::vector<at::Tensor> residuals_;  // one for each gradient, undefined where there is nothing
  at::Tensor memory_;  // in which they lie as the gradients do on the wire; undefined where they lie elsewhere
  int64_t alignment_ = 0;
  std::unordered_map<size_t, at::Tensor> before_;  // the newest sum, of the gradients that stood in for none
};

}  // namespace fastsync
