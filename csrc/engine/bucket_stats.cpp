#include "engine/bucket_stats.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "passes/aten/passes.h"
#include "passes/backend.h"
#include "sums/flat_gradients.h"

namespace fastsync {

BucketStats::BucketStats(c10::Device device, std::shared_ptr<Workspace> workspace)
    : workspace_(std::move(workspace)),
      values_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device))) {}

void BucketStats::measure(const std::vector<at::Tensor>& grads) {
  const at::Tensor largest = values_.select(0, kMaxMagnitude).clone();
  aten::measure(grads, values_);
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
    means.push_back((mean.is_complex() ? at::view_as_real(mean) : mean).contiguous());
  }
  if (means.empty()) {
    values_.zero_();
  } else {
    const DType dtype = dtype_of(means.front().scalar_type());
    FlatGradients gradients(std::move(means), dtype, values_.device());
    gradients.stats = values_;
    gradients.workspace = workspace_;
    at::Tensor wire = gradients.grads.front();
    if (gradients.grads.size() > 1) {
      wire = at::empty({bytes_of(gradients.num_values, dtype)}, wire.options().dtype(at::kByte));
      gradients.pack_all(wire.data_ptr());
    }
    gradients.unpack(gradients.all_values(), wire.data_ptr(), /*num_wires=*/1, /*stride=*/0, /*factor=*/1.0,
                     Position());
  }
  left_out_.reset();
}

}  // namespace fastsync
