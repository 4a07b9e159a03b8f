#include "engine/bucket_scale.h"

#include <ATen/ATen.h>

#include <utility>

#include "passes/aten/passes.h"
#include "passes/backend.h"
#include "passes/cuda_graphs.h"
#include "transport/streams.h"

namespace fastsync {

BucketScale::BucketScale(std::shared_ptr<const Team> ranks, at::Tensor stats)
    : ranks_(std::move(ranks)), stats_(std::move(stats)) {}

void BucketScale::set(const at::Tensor& scale) {
  largest_comes_.reset();
  has_value_ = scale.defined();
  has_followed_ = false;
  if (has_value_ && value_.defined()) {
    value_.copy_(scale);
  } else if (has_value_) {
    value_ = scale;
  }
}

// After a sum in which all values are zero or not finite, nothing tells the right scale. On CUDA the host would have to
// wait to know that. There the scale rises step by step instead, see next_bucket_scale.
bool BucketScale::is_lost() const {
  const double* stats = readable(stats_);
  return stats != nullptr && has_followed_ && stats[kMaxMagnitude] == 0.0;
}

void BucketScale::begin_sum(FlatGradients& gradients, const SendOptions& options) {
  take_largest();
  if (needs_agreement(options.compression)) {
    agree(gradients);
  } else if (options.compression.wire != DType::kFloat16) {
    has_value_ = false;  // it does not follow the gradients while another wire is in use
  }
  gradients.scale = has_value_ ? value_ : at::Tensor();
  if (options.shards || options.scatter) {
    sent_ = has_value_ ? value_.clone() : at::Tensor();
  }
  has_followed_ = !options.scatter;  // the statistics of a shard do not tell what all ranks have
}

// The first scale follows from the largest magnitude of the gradients on all ranks. That takes one pass, and one number
// to reduce.
void BucketScale::agree(const FlatGradients& gradients) {
  aten::measure(gradients.grads, stats_);
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  if (gradients.weight.defined()) {
    largest.mul_(gradients.weight);
  }
  all_reduce(*ranks_->group(), ranks_->device(), {{largest, c10d::ReduceOp::MAX}})->wait_for_rows();
  const at::Tensor otherwise = has_value_ ? value_ : at::ones_like(largest, at::kFloat);
  set(at::where(largest > 0, aten::power_of_two(aten::scale_exponent_for(largest)), otherwise));
}

void BucketScale::follow(double largest) {
  if (sent_.defined() && has_value_) {
    value_.fill_(next_bucket_scale(sent_.item<float>(), largest));
  }
}

void BucketScale::follow(const at::Tensor& largest) {
  if (sent_.defined() && has_value_) {
    value_.copy_(aten::next_scale(sent_, largest));
  }
}

// In a CUDA graph the ranks agree anew in each sum, because nothing that was sent outside of it may come inside.
void BucketScale::follow_all_shards(double factor) {
  if (!has_value_ || is_capturing(ranks_->device())) {
    set({});
    return;
  }
  largest_ = stats_.narrow(0, kMaxMagnitude, 1).div(factor * static_cast<double>(ranks_->size()));
  largest_comes_ = all_reduce(*ranks_->group(), ranks_->device(), {{largest_, c10d::ReduceOp::MAX}});
}

void BucketScale::take_largest() {
  if (!largest_comes_) {
    return;
  }
  if (is_capturing(ranks_->device())) {
    set({});
    return;
  }
  const auto transfer = std::move(largest_comes_);
  transfer->wait_for_rows();
  use_on_current_stream(largest_);
  if (const double* const largest = readable(largest_)) {
    follow(*largest);
  } else {
    follow(largest_);
  }
}

}  // namespace fastsync
