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
  // What roll_back needs: nothing, residuals that packing leaves where they are and writes elsewhere, or a copy.
  enum class Keep { kNothing, kOld, kCopy };

  // Has the bucket's passes add the residuals to what they send, and write what they lose to them. stand_in tells which
  // gradients stand in for one that this rank does not have.
  void apply_to(FlatGradients& gradients, const std::vector<bool>& stand_in, Keep keep);
  // Puts back the residuals from before the newest apply_to, if they were kept since forget_old.
  void roll_back();
  void forget_old() { has_old_ = false; }

  // Returns a residual for each gradient, flat, in the order of its indices and not of its memory. A residual is
  // undefined if nothing is kept.
  std::vector<at::Tensor> residuals() const;
  // Writes them to the memory of those that there are, if they fit.
  void set_residuals(const std::vector<at::Tensor>& residuals);

  // Puts back a stand-in's residual from before the newest sum. It is for gradients that no rank has, whose result is
  // thrown away.
  void restore(size_t index);

 private:
  struct Residuals {
    at::Tensor memory;  // holds them all, laid out as gradients on the wire; undefined before apply_to
    std::vector<at::Tensor> of_gradients;  // undefined if nothing is kept
  };

  static Residuals new_residuals(const FlatGradients& gradients);
  void keep_old(FlatGradients& gradients, Keep keep);
  bool fit(const std::vector<at::Tensor>& residuals) const;

  Residuals newest_;
  Residuals old_;  // before the newest sum, as far as has_old_ says
  bool has_old_ = false;
  int64_t alignment_ = 0;                          // the alignment of the residuals in their memory
  std::unordered_map<size_t, at::Tensor> before_;  // the residuals before the newest sum, of stand-ins
};

}  // namespace fastsync
