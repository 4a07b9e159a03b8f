// Error feedback keeps a bucket's residuals from sum to sum: what this rank has lost in packing its gradients and in
// encoding sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "sums/flat_gradients.h"

namespace fastsync {

// A residual belongs to one gradient and has its units. A loss in a sum also becomes part of this rank's residual,
// scaled so that it counts in the mean as this rank's gradient does.
class ErrorFeedback {
 public:
  // Has the bucket's passes add the residuals to what they send, and write what they lose to them. stand_in tells which
  // gradients stand in for one that this rank does not have.
  void lend(FlatGradients& gradients, const std::vector<bool>& stand_in);

  // Returns a residual for each gradient, flat, in the order of its indices and not of its memory. A residual is
  // undefined if nothing is kept.
  std::vector<at::Tensor> residuals() const;
  // Returns the same for set_residuals, in memory that holds until the next call.
  std::vector<at::Tensor> snapshot();
  // Writes them to the memory of those that there are, if they fit.
  void set_residuals(const std::vector<at::Tensor>& residuals);

  // Puts back a stand-in's residual from before the newest sum. It is for gradients that no rank has, whose result is
  // thrown away.
  void take_back(size_t index);

 private:
  void lay_out(const FlatGradients& gradients);
  bool fit(const std::vector<at::Tensor>& residuals) const;

  std::vector<at::Tensor> residuals_;  // by gradient; undefined if nothing is kept
  at::Tensor memory_;                  // holds all residuals, laid out as gradients on the wire; undefined before lend
  at::Tensor snapshot_;                // the memory of the newest snapshot; undefined if there was none
  int64_t alignment_ = 0;              // the alignment of the residuals in memory_
  std::unordered_map<size_t, at::Tensor> before_;  // the residuals before the newest sum, of stand-ins
};

}  // namespace fastsync
