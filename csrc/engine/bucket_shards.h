// Which means of a bucket each rank keeps, if ranks keep shards of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sums/flat_gradients.h"
#include "sums/plan.h"

namespace fastsync {

// Values of one gradient whose means a rank keeps.
struct ShardPiece {
  size_t gradient;  // its index in the bucket
  int64_t begin;    // the index of the first value, in the order of the gradient's memory
  int64_t numel;
  at::Tensor means;  // undefined if another rank keeps them
};
// Pieces begin and end at multiples of so many values, or where their gradient ends. torch's vectorised kernels then
// give each value the same bits in a piece as in the whole gradient.
constexpr int64_t kPieceValues = 64;

class BucketShards {
 public:
  // Makes the shards of a new plan. They have another number than all shards of the process before them.
  void make(const Plan& plan, const FlatGradients& gradients);

  int64_t number() const { return number_; }
  // By rank, in the order of the plan's team.
  const std::vector<std::vector<ShardPiece>>& of_ranks() const { return of_ranks_; }
  const std::vector<ShardPiece>& own() const;
  // The memory of this rank's means, which each sum writes to. Undefined before make.
  const at::Tensor& means() const { return means_; }
  // Makes this rank's means of a gradient zeros. Returns whether they were not.
  bool drop(size_t gradient);

 private:
  int64_t number_ = 0;
  int64_t rank_ = 0;
  std::vector<std::vector<ShardPiece>> of_ranks_;
  at::Tensor means_;
};

}  // namespace fastsync
