#include "engine/bucket_stats.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "passes/aten/passes.h"

namespace fastsync {

BucketStats::BucketStats(c10::Device device, std::shared_ptr<Workspace> workspace)
    : workspace_(std::move(workspace)),
      values_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

void BucketStats::measure(const std::vector<at::Tensor>& grads) {
  const at::Tensor largest = values_.select(0, kMaxMagnitude).clone();
  aten::measure(grads, values_);
  values_.select(0, kMaxMagnitude).copy_(largest);
}

FlatGradients BucketStats::flatten(std::vector<at::Tensor> means) const {
  const DType dtype = dtype_of(means.front().scalar_type());
  FlatGradients flat(std::move(means), dtype, values_.device());
  flat.stats = values_;
  flat.workspace = workspace_;
  return flat;
}

void BucketStats::multiply(const std::vector<at::Tensor>& means, const at::Tensor& factors) {
  const at::Tensor largest = values_.select(0, kMaxMagnitude).clone();
  flatten(means).multiply(factors);
  values_.select(0, kMaxMagnitude).copy_(largest);
}

double BucketStats::add_up(const std::vector<const double*>& of_shards) {
  std::array<double, kNumStats> sums{};
  for (const double* const theirs : of_shards) {
    for (const Stat stat : {kSumOfSquares, kNumNonfinite, kNumSaturated}) {
      sums[stat] += theirs[stat];
    }
    sums[kMaxMagnitude] = std::max(sums[kMaxMagnitude], theirs[kMaxMagnitude]);
  }
  values_.copy_(at::from_blob(sums.data(), {kNumStats}, at::kDouble));
  return sums[kMaxMagnitude];
}

at::Tensor BucketStats::add_up(const at::Tensor& of_shards) {
  const at::Tensor largest = of_shards.narrow(1, kMaxMagnitude, 1).amax(/*dim=*/0);
  values_.copy_(of_shards.sum(/*dim=*/0));
  values_.narrow(0, kMaxMagnitude, 1).copy_(largest);
  return largest;
}

void BucketStats::note_taken() {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_out_.reset();
}

void BucketStats::note_left_out(const std::vector<at::Tensor>& means) {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_out_.emplace();
  for (const at::Tensor& each : means) {
    left_out_->emplace_back(each.getIntrusivePtr(), each._version());
  }
}

// It makes the passes that the sync has left out, so it gives the same bits.
void BucketStats::take_left_out() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!left_out_) {
    return;
  }
  std::vector<at::Tensor> means;
  for (const auto& [id, version] : *left_out_) {
    const at::Tensor mean(id.lock());
    TORCH_CHECK(
        mean.defined() && mean._version() == version, "fastsync: nobody had asked for grad_stats() before the ",
        "newest sync, and its gradients have changed since: call grad_stats() before they are clipped, unscaled ",
        "or set to zero. Once it was called, each sync takes the statistics");
    const at::Tensor reals = mean.is_complex() ? at::view_as_real(mean) : mean;
    means.push_back(reals.is_non_overlapping_and_dense() ? reals : reals.contiguous());
  }
  if (means.empty()) {
    values_.zero_();
  } else {
    flatten(std::move(means)).multiply(/*factors=*/{});
  }
  left_out_.reset();
}

}  // namespace fastsync
