#include "engine/step.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "engine/synchronizer.h"
#include "transport/progress_thread.h"

namespace fastsync {

Step::Step(Synchronizer& engine, std::vector<Gradient> gradients)
    : engine_(engine),
      info_{.number = engine.take_number(),
            .rank = engine.group()->getRank(),
            .num_ranks = engine.group()->getSize(),
            .is_weighted = engine.weight_.is_on(),
            .is_active = engine.weight_.is_active()},
      gradients_(std::move(gradients)) {
  num_waiting_.reserve(layout().buckets.size());
  works_.reserve(layout().buckets.size());
  for (const LayoutBucket& bucket : layout().buckets) {
    num_waiting_.push_back(bucket.parameters.size());
  }
  engine_.side_values_.begin(info_);
  engine_.begin_step();
}

Step::~Step() {
  if (has_begun_to_send_ && !has_received_) {
    engine_.agreement_->is_broken = true;
  }
}

const Layout& Step::layout() const { return engine_.layout_; }

bool Step::has_sent_all() const { return layout().is_made() && works_.size() == layout().buckets.size(); }

// ---- collecting -----------------------------------------------------------------------------------------------------

void Step::mark_ready(size_t index) {
  TORCH_INTERNAL_ASSERT(is_collecting_);
  const bool again = gradients_[index].mark_ready();
  Parameter& parameter = engine_.parameters_[index];
  if (!layout().is_made()) {
    parameter.repeats |= again;
    if (!again) {
      order_.push_back(index);
    }
    return;
  }
  const size_t bucket = layout().bucket_of(index);
  if (bucket == Layout::kNone) {
    return;  // frozen since this step began
  }
  const bool was_repeating = std::exchange(parameter.repeats, parameter.repeats || again);
  TORCH_CHECK(
      !again || bucket >= works_.size(), "fastsync: parameter ", parameter.name,
      " got another gradient in the same backward after its bucket was sent, as a weight does that is shared ",
      "between reentrant checkpoints. From now on its bucket waits for the end of backward: run the step again, ",
      "on all ranks, after zero_grad()");
  if (!parameter.repeats) {
    num_waiting_[bucket] -= 1;
  } else if (!was_repeating) {
    num_waiting_[bucket] += 1;  // it had been counted as final
  }
}

void Step::mark_all_ready() {
  for (size_t index = gradients_.size(); index-- > 0;) {  // most likely the order of a backward
    if (gradients_[index].is_here()) {
      mark_ready(index);
    }
  }
}

// It must not wait for other ranks, because before the end of backward engines may come in different orders on
// different ranks.
void Step::send_full_buckets() {
  send_weight();
  bool weights_are_here = !info_.is_weighted;
  if (weights_) {
    engine_.wait_for_ranks(kAddingWeights, [&] { weights_are_here = weights_->has_come(); });
  }
  receive_beside();
  while (weights_are_here && works_.size() < layout().buckets.size() && may_go_early(works_.size())) {
    send_next();
  }
}

bool Step::may_go_early(size_t index) const {
  const LayoutBucket& next = layout().buckets[index];
  const Bucket& bucket = *next.bucket;
  const bool is_last = index + 1 == layout().buckets.size();
  // On a CPU, weights may come early on one rank and late on another. A bucket without a plan is a collective, and the
  // group pairs collectives by the order of calls. So a user's collective inside backward could come before the
  // bucket's on one rank, and after it on another.
  const bool waits_for_end = info_.is_weighted && bucket.device().is_cpu() && !bucket.has_plan();
  // A rank whose backward fails sends no rows of sparse gradients. Once it has announced them, others wait for them.
  const bool is_sparse = engine_.parameters_[next.parameters.front()].is_sparse;
  return num_waiting_[index] == 0 && !is_sparse && !waits_for_end && engine_.have_agreed() &&
         !bucket.waits_to_send(engine_.compressions()->at(next.num_reals)) &&
         !(is_last && engine_.side_values_.wait_for_end());
}

std::vector<size_t> Step::order() const {
  std::vector<size_t> order = order_;
  for (size_t index = gradients_.size(); index-- > 0;) {
    if (!gradients_[index].is_ready()) {
      order.push_back(index);
    }
  }
  std::erase_if(order, [&](size_t index) { return !takes_part(gradients_[index].tensor()); });
  return order;
}

// ---- sending --------------------------------------------------------------------------------------------------------

void Step::send_weight() {
  if (info_.is_weighted && !weights_ && layout().is_made() && engine_.have_agreed()) {
    engine_.liveness().note_averaging(number());
    weights_.emplace(engine_.weight_, engine_.op_ == Op::kSum, *engine_.group(),
                     layout().buckets.front().bucket->device(), has_failed());
  }
}

void Step::send_rest() {
  send_weight();
  if (weights_ && !has_failed()) {
    engine_.wait_for_ranks(kAddingWeights, [&] { weights_->wait(); });
  }
  while (works_.size() < layout().buckets.size()) {
    send_next();
  }
  is_collecting_ = false;
}

// Note [Unpacking beside backward]
//   On a device a bucket is unpacked while backward goes on. But autograd may make a gradient of memory that this
//   backward still reads, such as that of a sum's other term. So nobody else may hold that memory. When a bucket is
//   sent, autograd itself still holds its last gradient. So the next gradient's hook looks.
void Step::receive_beside() {
  for (; num_tried_ < works_.size(); ++num_tried_) {
    if (!layout().buckets[num_tried_].bucket->device().is_cpu()) {
      works_[num_tried_]->receive_beside(engine_.progress());
    }
  }
}

void Step::join_streams() const noexcept {
  for (const auto& work : works_) {
    work->join_streams();
  }
}

void Step::fail() {
  is_collecting_ = false;
  info_.has_failed = true;
  engine_.side_values_.fail();
}

void Step::leave_behind() {
  for (const auto& work : works_) {
    BucketWork::drive_later(work, engine_.progress());
  }
  if (has_sent_all()) {
    engine_.side_values_.leave_behind();
  }
  engine_.liveness().note_failed_backward();
}

// Makes the current stream wait for the streams on which gradients got ready. Those were current when the accumulators
// were made.
void Step::wait_for_gradients(const LayoutBucket& bucket) const {
  const c10::Stream current = current_stream(bucket.bucket->device());
  std::vector<c10::Stream> waited_for;
  for (const size_t index : bucket.parameters) {
    const auto& stream = gradients_[index].stream();
    if (stream && *stream != current && std::find(waited_for.begin(), waited_for.end(), *stream) == waited_for.end()) {
      c10::Event ready(stream->device_type());
      ready.record(*stream);
      ready.block(current);
      waited_for.push_back(*stream);
    }
  }
}

void Step::send_next() {
  if (!std::exchange(has_begun_to_send_, true)) {
    engine_.pass_agreement(*engine_.agreement_, number());  // now, because in memory that ranks share sending may wait
  }
  const size_t index = works_.size();
  const LayoutBucket& next = layout().buckets[index];
  Bucket& bucket = *next.bucket;
  if (!has_failed()) {
    wait_for_gradients(next);
    if (weights_) {
      weights_->wait_on_stream();
    }
  }
  std::vector<at::Tensor> grads;
  std::vector<bool> stand_in;
  grads.reserve(next.parameters.size());
  for (const size_t parameter : next.parameters) {
    Gradient& gradient = gradients_[parameter];
    const bool is_new = has_failed() || gradient.is_new();
    engine_.flags_.set(layout().flag_of(parameter), is_new, gradient.is_here());
    grads.push_back(has_failed() ? gradient.poison() : gradient.to_send(claimed_));
    stand_in.push_back(!is_new);
  }
  const c10::Device device = bucket.device();
  const bool is_last = index + 1 == layout().buckets.size();
  const at::Tensor weight = weights_ && !has_failed() ? weights_->factor(device) : at::Tensor();
  const at::Tensor side_values = is_last ? side_values_to_send(device, grads, weight) : at::Tensor();
  const SendOptions options{.compression = engine_.compressions()->at(next.num_reals),
                            .step = number(),
                            .tag = first_tag(engine_.agreement_->number) + static_cast<int>(index) * kTagsPerBucket,
                            .number = {.step_count = engine_.num_steps()},
                            .is_weighted_mean = info_.is_weighted && engine_.op_ != Op::kSum,
                            .weight = weight,
                            .shards = engine_.shards_.group(),
                            .may_be_rolled_back = engine_.is_revocable(),
                            .has_failed = has_failed(),
                            .needs_stats = engine_.needs_stats()};
  works_.push_back(bucket.send(std::move(grads), options, engine_.start_bucket(bucket), side_values, stand_in));
  if (is_last) {
    engine_.end_step();
  }
  // When messages arrive, this thread may go on with backward, or wait for another bucket. So the progress thread does
  // what follows. A single bucket at the end of backward is an exception: waking a thread would take longer than doing
  // it here. After a failure this thread may not come back for long.
  if (layout().buckets.size() > 1 || has_failed() || !device.is_cpu()) {
    BucketWork::drive_later(works_.back(), engine_.progress());
  }
}

at::Tensor Step::side_values_to_send(c10::Device device, at::TensorList grads, const at::Tensor& weight) {
  info_.device = device;
  info_.grads = grads;
  info_.weight = weight;
  info_.active = weights_ ? weights_->active() : at::Tensor();
  const at::Tensor row = engine_.side_values_.to_send(info_);
  info_.grads = {};
  return row;
}

// ---- receiving ------------------------------------------------------------------------------------------------------

void Step::receive() {
  TORCH_INTERNAL_ASSERT(!is_collecting_);
  const auto in_any_case = c10::make_scope_exit([this] { engine_.liveness().note_rest(); });
  for (const auto& work : works_) {
    if (has_failed()) {
      work->discard();
    } else {
      work->receive();
    }
  }
  if (!has_sent_all()) {
    return;
  }
  has_received_ = true;
  info_.is_captured = engine_.is_captured();
  if (weights_ && !has_failed()) {
    weights_->wait_on_stream();
    info_.active = weights_->active();
    layout().buckets.back().bucket->totals()->wire_bytes += weights_->sent_bytes();
  }
  engine_.side_values_.check(works_.back()->side_values(), info_);
  if (!has_failed() && engine_.shards_.are_kept()) {
    engine_.shards_.keep(gradients_);
  } else if (!has_failed()) {
    const at::Tensor factors = engine_.used_parameters_.factors(info_);
    for (size_t i = 0; i < works_.size(); ++i) {
      take_means(layout().buckets[i], *works_[i], factors);
    }
  }
  engine_.side_values_.take(info_);
}

// Note [Statistics of a step]
//   While a bucket is unpacked, statistics are taken of the means that come. A pass that multiplies means takes them
//   anew, see Note [Means of used parameters]. They are those of the gradients, except in two cases. Then they are
//   taken again, see Bucket::measure:
//     - A mean was added to a parameter's sum. The gradient is the new sum.
//     - No rank has a new gradient of a parameter. So the ranks sent the gradients that they keep, if these can travel
//       as they are. They cannot with op="sum" and op="mean_of_used", where zeros travel, nor with error feedback,
//       which adds residuals. If they can, statistics count the mean that has come. If not, they count the kept
//       gradient if every rank has one, else zeros.
//   All of this follows from what all ranks know, so that statistics are the same on all ranks.

void Step::note_unmeasured(const LayoutBucket& bucket) {
  std::vector<at::Tensor> means;
  for (const size_t index : bucket.parameters) {
    if (const at::Tensor& mean = grad_of(gradients_[index].tensor()); mean.defined()) {
      means.push_back(mean);
    }
  }
  bucket.bucket->note_unmeasured(means);
}

std::vector<at::Tensor> Step::counted(const LayoutBucket& bucket) const {
  std::vector<at::Tensor> counted;
  for (const size_t index : bucket.parameters) {
    counted.push_back(gradients_[index].counted());
  }
  return counted;
}

// The factors of a bucket lie side by side. Those of gradients that no rank has are 1.
void Step::multiply_means(const LayoutBucket& bucket, const at::Tensor& factors_of_all) const {
  const auto first = static_cast<int64_t>(layout().flag_of(bucket.parameters.front()));
  const at::Tensor factors = factors_of_all.narrow(0, first, std::ssize(bucket.parameters));
  if (!factors.is_cpu() || factors.ne(1.0).any().item<bool>()) {
    bucket.bucket->multiply(counted(bucket), factors.to(bucket.bucket->device()));
  }
}

void Step::take_means(const LayoutBucket& bucket, const BucketWork& work, const at::Tensor& factors_of_all) {
  GradientFlags& flags = engine_.flags_;
  const bool kept_travels = engine_.op_ == Op::kMean && !work.has_error_feedback();  // as it is
  if (factors_of_all.defined()) {
    multiply_means(bucket, factors_of_all);
  }
  bool statistics_hold = true;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t index = bucket.parameters[i];
    const size_t flag = layout().flag_of(index);
    Gradient& gradient = gradients_[index];
    const bool exists = !gradient.has_stand_in() || flags.on_some_rank(flag, gradient.parameter().name);
    statistics_hold &= gradient.take_mean(exists);
    if (!exists) {
      bucket.bucket->feedback().restore(i);
      if (!kept_travels) {
        gradient.count_kept_or_zeros(flags.is_kept_everywhere(flag));
        statistics_hold = false;
      }
    }
  }
  if (!statistics_hold) {
    bucket.bucket->measure(counted(bucket));
  }
  if (work.leaves_stats_out()) {
    note_unmeasured(bucket);
  }
}

}  // namespace fastsync
