#include "engine/bucket.h"

#include <ATen/ATen.h>

#include <utility>

#include "passes/backend.h"
#include "passes/cuda_graphs.h"
#include "transport/without_python_objects.h"

namespace fastsync {

Bucket::Bucket(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
               std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters,
               std::shared_ptr<Agreement> agreement)
    : parameters(std::move(parameters)),
      agreement(std::move(agreement)),
      failure_(c10::str("fastsync: averaging ", name, " failed on rank ", group->getRank(), " of ", group->getSize())),
      liveness_(std::move(liveness)),
      workspace_(std::make_shared<Workspace>(device)),
      stats_(device, workspace_),
      sums_(std::move(group), device, stats_.values(), workspace_, totals_),
      scale_(sums_.teams().all(), stats_.values()) {
  totals_->kernels = kernels_on(device.type());
}

std::shared_ptr<BucketWork> Bucket::send(std::vector<at::Tensor> grads, const SendOptions& options,
                                         std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                         const std::vector<bool>& stand_in) {
  const WithoutPythonObjects without_python;
  liveness_->note_averaging(options.step);
  auto sum = make_sum(std::move(grads), options, *stopwatch, side_values, stand_in);
  totals_->num_syncs += 1;
  TORCH_CHECK(!is_half_sent_, failure_,
              ": it has failed before, while it was sent, so the ranks no longer meet in one ",
              "message: begin anew with another process group");
  guard(failure_, *liveness_, [&] {
    is_half_sent_ = !sum->may_be_sent_again();
    sum->send();
    is_half_sent_ = false;
  });
  if (is_capturing(device())) {  // asked first, because the list costs more
    hold_for_graph(device(),
                   {scale_.memory(), stats(), workspace_->totals(), sum->gradients().residual, sums_.buffer(options)});
  }
  stopwatch->mark(Mark::kSent);
  return std::make_shared<BucketWork>(shared_from_this(), std::move(sum), std::move(stopwatch));
}

std::unique_ptr<SumWork> Bucket::make_sum(std::vector<at::Tensor> grads, const SendOptions& options,
                                          Stopwatch& stopwatch, const at::Tensor& side_values,
                                          const std::vector<bool>& stand_in) {
  if (grads.front().is_sparse()) {
    stopwatch.mark(Mark::kStart);
    return sums_.make_sparse(grads.front(), options, side_values);
  }
  FlatGradients gradients = sums_.flatten(std::move(grads), options, side_values);
  if (options.may_be_rolled_back) {
    keep_before(options.step);
  }
  std::unique_ptr<SumWork> sum;
  guard(failure_, *liveness_, [&] {
    sums_.choose_plan(gradients, options);
    scale_.begin_sum(gradients, options);
    stopwatch.mark(Mark::kStart);
    keep_error(gradients, options, stand_in);
    sum = sums_.make(std::move(gradients), options);
  });
  return sum;
}

// A LowRankSum reads residuals and writes them to one place.
void Bucket::keep_error(FlatGradients& gradients, const SendOptions& options, const std::vector<bool>& stand_in) {
  using Keep = ErrorFeedback::Keep;
  if (!options.compression.error_feedback) {
    ErrorFeedback dropped = std::exchange(feedback_, {});
    if (options.may_be_rolled_back) {
      before_->feedback = std::move(dropped);
    }
    return;
  }
  const bool writes_elsewhere = device().is_cpu() && options.compression.low_rank == 0;
  feedback_.apply_to(gradients, stand_in,
                     !options.may_be_rolled_back ? Keep::kNothing
                     : writes_elsewhere          ? Keep::kOld
                                                 : Keep::kCopy);
}

void Bucket::set_saved(const at::Tensor& scale, const std::vector<at::Tensor>& residuals,
                       std::vector<at::Tensor> factors) {
  before_.reset();
  set_scale(scale);
  feedback_.set_residuals(residuals);
  set_factors(std::move(factors));
}

// If sending has failed, the bucket is sent again in the same step. Then what was before the first time stays kept. The
// scale goes on from the first time, because the ranks may have agreed on it.
void Bucket::keep_before(int64_t step) {
  if (before_ && before_->step == step) {
    put_residuals_back();
  } else {
    const at::Tensor scale = scale_.value();
    before_ = Before{step, scale.defined() ? scale.clone() : scale, factors()};
  }
  feedback_.forget_old();
}

void Bucket::put_residuals_back() {
  if (before_->feedback) {
    feedback_ = std::move(*std::exchange(before_->feedback, std::nullopt));
  } else {
    feedback_.roll_back();
  }
}

void Bucket::roll_back(int64_t step) {
  if (before_ && before_->step == step) {
    scale_.set(before_->scale);
    put_residuals_back();
    set_factors(before_->factors);
    before_.reset();
  }
}

void Bucket::follow_all_shards(double factor) {
  const WithoutPythonObjects without_python;
  guard(failure_, *liveness_, [&] { scale_.follow_all_shards(factor); });
}

void Bucket::drop_from_shard(size_t gradient) {
  if (sums_.shards().drop(gradient)) {
    measure({sums_.shards().means()});
  }
}

void Bucket::take_stats(const std::vector<const double*>& of_shards) {
  scale_.follow(stats_.add_up(of_shards) / sums_.mean_factor());
}

void Bucket::take_stats(const at::Tensor& of_shards) {
  scale_.follow(stats_.add_up(of_shards).div(sums_.mean_factor()));
}

}  // namespace fastsync
