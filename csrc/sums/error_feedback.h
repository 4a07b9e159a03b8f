// The residuals of a bucket: what this rank has lost in packing its gradients and in encoding sums, kept from sum to
// sum. Knows no network.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sums/flat_gradients.h"

namespace fastsync {

// A residual belongs to one gradient and has its units. What is lost of a sum counts as this rank's gradient does, so
// it becomes part of that gradient's residual.
class ErrorFeedback {
 public:
  // Has the bucket's passes send the residuals, and keep what they lose. stand_in tells which gradients stand in for
  // one that this rank does not have.
  void lend(FlatGradients& gradients, const std::vector<bool>& stand_in);

  // One for each gradient, flat, in the order of its indices and not of its memory. Undefined if nothing is kept.
  std::vector<at::Tensor> residuals() const;
  void set_residuals(const std::vector<at::Tensor>& residuals);

  // Puts back the residual from before the newest sum, because no rank has the gradient and the result is thrown away.
  void take_back(size_t index);

 private:
  void lay_out(const FlatGradients& gradients);

  std::vector<at::Tensor> residuals_;  // by gradient; undefined if nothing is kept
  at::Tensor memory_;                  // of all residuals, laid out as the gradients on the wire; undefined before lend
  int64_t alignment_ = 0;              // that memory_ was laid out with
  std::unordered_map<size_t, at::Tensor> before_;  // the residuals before the newest sum, of stand-ins
};

}  // namespace fastsync
