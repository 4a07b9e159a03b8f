// What a bucket's wire has not carried yet, from sum to sum: what packing lost on this rank, and what this rank lost of
// the sums that it encoded. Knows no network.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
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

  // False where it was never on, or nothing is left of it.
  bool has_residuals() const { return !residuals_.empty(); }

  // Has the bucket's passes send what is kept, and keep what they lose; owned: of which sums. Where error feedback is
  // off, what there still is goes with the next gradient of this rank, and what that loses is lost: not with one that
  // stands in for none, which may go nowhere.
  void lend(Bucket& bucket, bool is_on, const Owned& owned, const std::vector<bool>& stand_in);

  // Puts what is kept into the gradients themselves, one for each, where nothing is to be kept any more.
  void add_to(const std::vector<at::Tensor>& grads);

  // One for each gradient, undefined where nothing is kept. Setting them keeps what others held in of_sums.
  std::vector<Residual> residuals() const;
  void set_residuals(const std::vector<Residual>& residuals);

  // No rank has the gradient, so what was sent of it in the newest sum has gone nowhere: what was kept before is kept
  // again.
  void take_back(size_t index);

  // The gradients' unit is another from now on.
  void rescale(const at::Tensor& factor);

 private:
  struct Kept {
    at::Tensor own;
    std::vector<at::Tensor> of_sums;  // of each part that is owned
  };

  Kept kept(size_t index) const;
  void hand_over(const Owned& now_owned);
  std::vector<at::Tensor> residuals_of_sums() const;

  int64_t num_ranks_;
  std::vector<at::Tensor> residuals_;  // what packing lost, one for each gradient; undefined where that is over
  at::Tensor owned_residual_;          // what encoding the sums lost, and of which values of the gradients
  Owned owned_;
  std::vector<at::Tensor> loaded_residuals_of_sums_;  // until it is known which values are owned
  std::unordered_map<size_t, Kept> before_;           // the newest sum, by the gradients that stood in for none
};

}  // namespace fastsync
