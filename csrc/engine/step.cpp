#include "engine/step.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/sample.h"
#include "passes/backend.h"

namespace fastsync {

namespace {

constexpr auto kBuffers = "";           // the buffers' name among the side values
constexpr double kLeastWeight = 1e-30;  // of the ranks that have used a parameter, in units of the mean weight

}  // namespace

Step::Step(StepContext& context, std::vector<Gradient> gradients)
    : context_(context), number_(context.engine.take_number()), gradients_(std::move(gradients)) {
  num_waiting_.reserve(layout().buckets.size());
  works_.reserve(layout().buckets.size());
  for (const LayoutBucket& bucket : layout().buckets) {
    num_waiting_.push_back(bucket.parameters.size());
  }
  context_.side_values.flags.clear();
  context_.agreement->step_check.begin_step(number_, context_.weight.is_active());
  engine().begin_step();
}

Step::~Step() {
  if (has_begun_to_send_ && !has_received_) {
    context_.agreement->is_broken = true;
  }
}

// ---- collecting -----------------------------------------------------------------------------------------------------

void Step::mark_ready(size_t index) {
  TORCH_INTERNAL_ASSERT(state_ == State::kCollecting);
  const bool again = gradients_[index].mark_ready();
  Parameter& parameter = context_.parameters[index];
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
  bool weights_are_here = !context_.weight.is_on();
  if (weights_) {
    engine().wait_for_ranks(kAddingWeights, [&] { weights_are_here = weights_->has_come(); });
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
  const bool waits_for_end = context_.weight.is_on() && bucket.device().is_cpu() && !bucket.has_plan();
  // A rank whose backward fails sends no rows of sparse gradients. Once it has announced them, others wait for them.
  const bool is_sparse = context_.parameters[next.parameters.front()].is_sparse;
  return num_waiting_[index] == 0 && !is_sparse && !waits_for_end && have_agreed() &&
         !bucket.waits_to_send(engine().compressions()->at(next.num_reals)) &&
         !(is_last && context_.buffers.are_sent());
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
  if (context_.weight.is_on() && !weights_ && layout().is_made() && have_agreed()) {
    engine().liveness().note_averaging(number_);
    weights_.emplace(context_.weight, context_.op == Op::kSum, *engine().group(),
                     layout().buckets.front().bucket->device(), has_failed());
  }
}

void Step::send_rest() {
  send_weight();
  if (weights_ && !has_failed()) {
    engine().wait_for_ranks(kAddingWeights, [&] { weights_->wait(); });
  }
  while (works_.size() < layout().buckets.size()) {
    send_next();
  }
  if (!has_failed()) {
    state_ = State::kSent;
  }
}

// Note [Unpacking beside backward]
//   On a device a bucket is unpacked while backward goes on. But autograd may make a gradient of memory that this
//   backward still reads, such as that of a sum's other term. So nobody else may hold that memory. When a bucket is
//   sent, autograd itself still holds its last gradient. So the next gradient's hook looks.
void Step::receive_beside() {
  for (; num_tried_ < works_.size(); ++num_tried_) {
    if (!layout().buckets[num_tried_].bucket->device().is_cpu()) {
      works_[num_tried_]->receive_beside(engine().progress());
    }
  }
}

void Step::join_streams() const noexcept {
  for (const auto& work : works_) {
    work->join_streams();
  }
}

void Step::fail() {
  state_ = State::kFailed;
  context_.signals = std::numeric_limits<double>::quiet_NaN();
}

void Step::leave_behind() {
  for (const auto& work : works_) {
    BucketWork::drive_later(work, engine().progress());
  }
  if (context_.shards && has_sent_all()) {
    tell_stats();
  }
  engine().liveness().note_failed_backward();
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
    engine().pass_agreement(*context_.agreement, number_);  // now, because in memory that ranks share sending may wait
  }
  const size_t number = works_.size();
  const LayoutBucket& next = layout().buckets[number];
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
  for (const size_t index : next.parameters) {
    Gradient& gradient = gradients_[index];
    const bool is_new = has_failed() || gradient.is_new();
    context_.side_values.flags.set(layout().flag_of(index), is_new, gradient.is_here());
    grads.push_back(has_failed() ? gradient.poison() : gradient.to_send(claimed_));
    stand_in.push_back(!is_new);
  }
  const c10::Device device = bucket.device();
  const bool is_last = number + 1 == layout().buckets.size();
  const at::Tensor weight = weights_ && !has_failed() ? weights_->factor(device) : at::Tensor();
  const at::Tensor side_values = is_last ? side_values_to_send(device, grads, weight) : at::Tensor();
  const SendOptions options{engine().compressions()->at(next.num_reals),
                            number_,
                            first_tag(context_.agreement->number) + static_cast<int>(number) * kTagsPerBucket,
                            engine().num_steps(),
                            /*is_weighted_mean=*/context_.weight.is_on() && context_.op != Op::kSum,
                            weight,
                            /*in_place=*/false,
                            /*scatter=*/nullptr,
                            /*may_be_taken_back=*/engine().is_revocable(),
                            /*keeps_shard=*/context_.shards != nullptr,
                            /*may_share_memory=*/!context_.shards || context_.shards->shares_memory(),
                            /*has_failed=*/has_failed()};
  works_.push_back(bucket.send(std::move(grads), options, engine().start_bucket(bucket), side_values, stand_in));
  if (is_last) {
    engine().end_step();
  }
  // When messages arrive, this thread may go on with backward, or wait for another bucket. So the progress thread does
  // what follows. A single bucket at the end of backward is an exception: waking a thread would take longer than doing
  // it here. After a failure this thread may not come back for long.
  if (layout().buckets.size() > 1 || has_failed() || !device.is_cpu()) {
    BucketWork::drive_later(works_.back(), engine().progress());
  }
}

at::Tensor Step::side_values_to_send(c10::Device device, const std::vector<at::Tensor>& grads,
                                     const at::Tensor& weight) {
  SideValues& side_values = context_.side_values;
  if (context_.buffers.are_sent()) {
    const int64_t rank = engine().group()->getRank();
    const at::Tensor active = weights_ ? weights_->active() : at::Tensor();
    const at::Tensor is_first = active.defined()
                                    ? (active.argmax() == rank).to(device)
                                    : at::full({}, rank == 0, at::TensorOptions().dtype(at::kBool).device(device));
    side_values.named.put(kBuffers, context_.buffers.values(is_first));
    side_values.named.make_slots();
  }
  const bool compares_data = engine().num_steps() == 1 && !context_.weight.is_on() && !context_.expects_same_data;
  auto stamp = context_.agreement->step_check.stamp(
      context_.agreement->number, device, compares_data ? grads : at::TensorList(), engine().weight_check().get());
  return side_values.to_send(std::move(stamp), weight, context_.weight.is_active(), has_failed(), device);
}

// ---- receiving ------------------------------------------------------------------------------------------------------

void Step::receive() {
  TORCH_INTERNAL_ASSERT(state_ != State::kCollecting);
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
  context_.side_values.arrive(works_.back()->side_values(), engine().is_captured());
  if (!has_failed()) {
    take_signals();
  }
  if (context_.shards) {
    if (!has_failed()) {
      find_means();
    }
    tell_stats();
    hear_stats();
  }
  if (!has_failed()) {
    if (weights_) {
      weights_->wait_on_stream();
      layout().buckets.back().bucket->totals()->wire_bytes += weights_->sent_bytes();
      context_.active = weights_->active();
    }
    context_.shards ? keep_gradients() : hand_out();
    take_side_values();
  }
  context_.agreement->step_check.arrive(context_.side_values.stamps(), engine().weight_check().get());
}

// A rank that has failed sends nan, in place of gradients too. If steps may be taken back, nobody sees those.
void Step::take_signals() {
  if (context_.side_values.signal) {
    context_.signals = context_.side_values.signals();
    if (std::isnan(*context_.signals)) {
      engine().liveness().note_failure();
      TORCH_CHECK(false, "fastsync: another rank has failed in step ", number_);
    }
  }
}

// Note [Statistics of a step]
//   While a bucket is unpacked, statistics are taken of the means that come. They are those of the gradients, except in
//   three cases. Then they are taken again, see Bucket::measure:
//     - A mean was added to a parameter's sum. The gradient is the new sum.
//     - No rank has a new gradient of a parameter. So the ranks sent the gradients that they keep, if these can travel
//       as they are. They cannot with op="sum" and op="mean_of_used", where zeros travel, nor with error feedback,
//       which adds residuals. If they can, statistics count the mean that has come. If not, they count the kept
//       gradient if every rank has one, else zeros.
//     - A mean was multiplied, see Note [Means of used parameters].
//   All of this follows from what all ranks know, so that statistics are the same on all ranks.

void Step::hand_out() {
  const at::Tensor factors = context_.op == Op::kMeanOfUsed ? factors_of_used() : at::Tensor();
  for (size_t i = 0; i < works_.size(); ++i) {
    hand_out(layout().buckets[i], factors,
             /*kept_travels=*/context_.op == Op::kMean && !works_[i]->has_error_feedback());
  }
}

void Step::hand_out(const LayoutBucket& bucket, const at::Tensor& factors_of_all, bool kept_travels) {
  GradientFlags& flags = context_.side_values.flags;
  const at::Tensor factors = factors_of_all.defined() ? factors_of_all.to(bucket.bucket->device()) : factors_of_all;
  bool statistics_hold = true;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const size_t index = bucket.parameters[i];
    const size_t flag = layout().flag_of(index);
    Gradient& gradient = gradients_[index];
    const bool exists = !gradient.has_stand_in() || flags.on_some_rank(flag, gradient.parameter().name);
    if (exists && factors.defined()) {
      statistics_hold &= !gradient.multiply_mean(factors[static_cast<int64_t>(flag)]);
    }
    statistics_hold &= gradient.take_mean(exists);
    if (!exists) {
      bucket.bucket->feedback().take_back(i);
      if (!kept_travels) {
        gradient.count_kept_or_zeros(flags.is_kept_everywhere(flag));
        statistics_hold = false;
      }
    }
  }
  if (!statistics_hold) {
    std::vector<at::Tensor> counted;
    for (const size_t index : bucket.parameters) {
      counted.push_back(gradients_[index].counted());
    }
    bucket.bucket->measure(counted);
  }
}

// Note [Means of used parameters]
//   With op="mean_of_used" a mean is over the ranks that have a new gradient of the parameter. Nobody knows these ranks
//   before the last bucket is sent. So the ranks add up the mean over all ranks, and multiply it afterwards. They leave
//   it as it is if all ranks have a gradient. Then it has the bits that op="mean" gives, and no other pass is needed.
//   A residual is part of that first mean, also a rank's that has no gradient now: it may come of encoding sums.
//
// Returns the factors by flag, float64. They are 1 for parameters without users, and for users that count for nothing:
// their part of the mean would be lost in float32.
at::Tensor Step::factors_of_used() const {
  const SideValues& side_values = context_.side_values;
  const auto num_ranks = static_cast<double>(engine().group()->getSize());
  const at::Tensor flags = side_values.flag_sums();
  const at::Tensor users = side_values.user_sums().to(at::kDouble);
  const at::Tensor num_active =
      weights_ ? weights_->active().sum().to(users.device()) : at::full({}, num_ranks, users.options());
  const at::Tensor is_mean_of_all = flags.gt(num_active - 0.5).logical_or_(users < kLeastWeight);
  return at::where(is_mean_of_all, 1.0, num_ranks / users);
}

// Note [Shards]
//   With shard_optimizer each rank keeps the means of its own shards, and steps these. `.grad` stays this rank's
//   own. Ranks end a sync by telling each other the statistics of their shards: so each rank knows the norm, whether a
//   mean is not finite, and which scale fp16 has next. A GradScaler looks at `.grad` alone. So if a mean is not finite,
//   each rank makes a gradient of its own nan, and all scalers skip the same step.

// After a failure it may be called twice: first early, so that nobody waits for this rank.
void Step::tell_stats() {
  if (has_told_stats_) {
    return;
  }
  std::vector<at::Tensor> stats;
  for (const LayoutBucket& each : layout().buckets) {
    stats.push_back(each.bucket->stats());
  }
  const at::Tensor on_host = at::stack(stats).cpu();
  if (has_failed()) {
    on_host.select(1, kNumNonfinite).fill_(1.0);
  }
  const auto* const numbers = on_host.const_data_ptr<double>();
  context_.shards->tell({numbers, numbers + on_host.numel()});
  has_told_stats_ = true;  // not if telling has failed
}

void Step::hear_stats() {
  std::vector<std::vector<double>> all;
  engine().wait_for_ranks("adding up the norm of the gradients", [&] {
    all = context_.shards->hear();
    for (const auto& theirs : all) {
      TORCH_CHECK(theirs.size() == kNumStats * layout().buckets.size(), "another rank steps with the optimizer, where ",
                  "this rank averages gradients: every rank has to call optimizer.step() after the same backwards");
    }
  });
  for (size_t i = 0; i < layout().buckets.size(); ++i) {
    std::vector<const double*> stats;
    for (const auto& theirs : all) {
      stats.push_back(theirs.data() + i * kNumStats);
    }
    layout().buckets[i].bucket->take_stats(stats);
  }
}

// A parameter has means if some rank has a new gradient, or if all have kept one. What comes of others are residuals,
// or gradients that only some ranks have kept.
void Step::find_means() {
  GradientFlags& flags = context_.side_values.flags;
  context_.have_means.assign(gradients_.size(), false);
  for (const LayoutBucket& each : layout().buckets) {
    for (size_t i = 0; i < each.parameters.size(); ++i) {
      const size_t index = each.parameters[i];
      const size_t flag = layout().flag_of(index);
      const bool is_new = flags.on_some_rank(flag, gradients_[index].parameter().name);
      context_.have_means[index] = is_new || flags.is_kept_everywhere(flag);
      if (!context_.have_means[index]) {
        each.bucket->feedback().take_back(i);
        each.bucket->drop_from_shard(i);
      }
    }
  }
}

void Step::keep_gradients() {
  const bool is_finite = std::ranges::all_of(layout().buckets, [](const LayoutBucket& each) {
    return each.bucket->stats().select(0, kNumNonfinite).item<double>() == 0.0;
  });
  if (!is_finite && std::ranges::none_of(gradients_, [](const Gradient& gradient) { return gradient.spoil(); })) {
    const auto with_means = std::ranges::find(context_.have_means, true) - context_.have_means.begin();
    gradients_.at(with_means).make_spoiled();
  }
  for (Gradient& gradient : gradients_) {
    gradient.keep();
    gradient.parameter().sample = sample_of(grad_of(gradient.tensor()));
  }
}

void Step::take_side_values() {
  const NamedValues& named = context_.side_values.named;
  context_.means.clear();
  const at::Tensor sums = context_.side_values.named_sums();
  if (sums.numel() == 0) {
    return;
  }
  const at::Tensor means =
      weights_ ? sums.div(weights_->active().sum().to(sums.device())) : sums.div(engine().group()->getSize());
  context_.means = named.by_name(means);
  if (context_.means.erase(kBuffers) > 0) {
    context_.buffers.arrive(named.by_name(sums).at(kBuffers));
  }
}

}  // namespace fastsync
