// What a bucket's wire has not carried yet, from sum to sum: what packing lost on this rank, and what this rank lost of
// the sums that it encoded. Knows no network.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "sums/bucket.h"

namespace fastsync {

// Of one gradient, in its own units: what packing lost, and what was lost of the sums that this rank encoded (zeros
// where others did). Flat, in the order of the gradient's memory; undefined where there is nothing.
struct Residual {
  at::Tensor own;
  at::Tensor of_sums;
};

class ErrorFeedback {
 public:
  explicit ErrorFeedback(int64_t num_ranks) : num_ranks_(num_ranks) {}

  // False where it was never on.
  bool has_residuals() const { return !residuals_.empty(); }

  // Has the bucket's passes send what is kept, and keep what they lose; owned: of which sums. Where error feedback is
  // off, what there still is is sent once more, and what that loses is lost. Gradients that stand in for none take no
  // part.
  void lend(Bucket& bucket, bool is_on, const Owned& owned, const std::vector<bool>& stand_in);

  // Puts what is kept into the gradients themselves, one for each, where nothing is to be kept any more.
  void add_to(const std::vector<at::Tensor>& grads);

  // One for each gradient. Setting them keeps what others held in of_sums.
  std::vector<Residual> residuals() const;
  void set_residuals(const std::vector<Residual>& residuals);

  // The mean of a gradient that no rank has is what was kept of the sums: to be sent again. On all ranks. False where
  // nothing is ever kept.
  bool take_back(size_t index, const at::Tensor& mean);

 private:
  void hand_over(const Owned& now_owned);
  std::vector<at::Tensor> residuals_of_sums() const;

  int64_t num_ranks_;
  std::vector<at::Tensor> residuals_;  // what packing lost, one for each gradient
  at::Tensor owned_residual_;          // what encoding the sums lost, and of which values of the gradients
  Owned owned_;
  std::vector<at::Tensor> loaded_residuals_of_sums_;  // until it is known which values are owned
};

}  // namespace fastsync
