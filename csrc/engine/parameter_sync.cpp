#include "engine/parameter_sync.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>
#include <utility>

#include "passes/backend.h"
#include "transport/agreement.h"
#include "transport/without_python_objects.h"

namespace fastsync {

constexpr auto kAddingWeights = "adding up the ranks' weights";
constexpr auto kBuffers = "";  // among named side values

ParameterSync::ParameterSync(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                             c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums)
    : EngineState(std::move(group), "the engine of parameter " + names.front(), "with sync.join():"),
      bucket_cap_bytes_(bucket_cap_bytes),
      sums_(sums),
      agreement_(std::make_shared<Agreement>(*group_, "the engine of parameter " + names.front())),
      weight_(sums) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters_.emplace_back(parameters[i], std::move(names[i]), sums);
  }
}

// ---- one sync ---------------------------------------------------------------------------------------------------

void ParameterSync::begin() {
  check_not_forked();
  std::string change;
  for (Parameter& parameter : parameters_) {
    parameter.tensor = parameter.lock();
    parameter.is_ready = false;
    parameter.stream.reset();
    parameter.stand_in.reset();
    if (!parameter.tensor.grad().defined()) {
      parameter.sum.reset();  // zero_grad() is meant for it, too
    }
    if (is_laid_out() && change.empty()) {
      change = parameter.change();
    }
  }
  if (!change.empty()) {
    forget_layout();
    agree_anew(std::move(change));
  }
  for (Bucket& bucket : buckets_) {
    bucket.num_waiting = bucket.parameters.size();
    bucket.work.reset();  // of a sync that failed
  }
  order_.clear();
  next_bucket_ = 0;
  is_poisoned_ = false;
  side_values_.clear_flags();
  weight_.begin();
  agreement_->step_check.begin_step(step_, weight_.is_active());
  is_under_way_ = true;
  begin_step();
}

void ParameterSync::mark_ready(size_t index) {
  Parameter& parameter = parameters_[index];
  parameter.check_gradient();
  parameter.mark_new(/*is_left_over=*/false);
  parameter.stream = current_stream(parameter.tensor.device());
  const bool again = std::exchange(parameter.is_ready, true);
  if (!is_laid_out()) {
    parameter.repeats |= again;
    if (!again) {
      order_.push_back(index);
    }
    return;
  }
  if (parameter.bucket == Parameter::kNone) {
    return;  // frozen since this sync began
  }
  Bucket& bucket = buckets_[parameter.bucket];
  const bool was_repeating = std::exchange(parameter.repeats, parameter.repeats || again);
  TORCH_CHECK(
      !again || parameter.bucket >= next_bucket_, "fastsync: parameter ", parameter.name,
      " got another gradient in the same backward after its bucket was sent, as a weight does that is shared ",
      "between reentrant checkpoints. From now on its bucket waits for the end of backward: run the step again, ",
      "on all ranks, after zero_grad()");
  if (!parameter.repeats) {
    bucket.num_waiting -= 1;
  } else if (!was_repeating) {
    bucket.num_waiting += 1;  // it had been counted as final
  }
}

void ParameterSync::mark_all_ready() {
  for (size_t index = parameters_.size(); index-- > 0;) {  // the order in which a backward would most likely come
    if (parameters_[index].tensor.grad().defined()) {
      mark_ready(index);
    }
  }
}

// Nothing that waits for other ranks may happen before the end of backward: which engine comes first is not the same on
// all ranks until then.
void ParameterSync::send_full_buckets() {
  post_weight();
  bool weight_is_here = !weight_.is_on();
  if (!weight_is_here) {
    wait_for_ranks(kAddingWeights, [&] { weight_is_here = weight_.has_come(); });
  }
  while (weight_is_here && next_bucket_ < buckets_.size() && may_go_early(buckets_[next_bucket_])) {
    send_next();
  }
}

bool ParameterSync::may_go_early(const Bucket& bucket) const {
  // On a CPU it depends on time whether weights have come. What the group itself adds up, it pairs by the order of
  // calls. So a collective that somebody else calls inside backward would come before it here, and after it there.
  const bool waits_for_end = weight_.is_on() && bucket.sync->device().is_cpu() && !bucket.sync->has_room();
  return bucket.num_waiting == 0 && !waits_for_end && have_agreed() &&
         !bucket.sync->waits_to_send(compressions_->at(bucket.numel)) && !(is_last(bucket) && describe_buffers_);
}

// Before all that is sent, on every rank: whatever there is to agree on comes after it, unless it is known before the
// first gradient.
void ParameterSync::post_weight() {
  if (weight_.is_on() && !weight_.is_posted() && is_laid_out() && have_agreed()) {
    liveness_->average(step_);
    weight_.post(*group_, buckets_.front().sync->device(), is_poisoned_);
  }
}

void ParameterSync::send_rest() {
  post_weight();
  if (!is_laid_out() || next_bucket_ < buckets_.size()) {  // else there is nothing left to agree on
    prepare();
  }
  pass_agreement(*agreement_, step_);
  post_weight();
  if (weight_.is_posted() && !is_poisoned_) {
    wait_for_ranks(kAddingWeights, [&] { weight_.wait(); });
  }
  while (next_bucket_ < buckets_.size()) {
    send_next();
  }
}

// Those who wait for this rank's part of what it has sent before need not wait for its next backward.
void ParameterSync::poison() {
  is_poisoned_ = true;
  send_rest();
  for (const Bucket& bucket : buckets_) {
    BucketWork::drive_later(bucket.work, progress_);
  }
  liveness_->give_up();
}

// Accumulators that were made under several streams accumulate on several, and this may be yet another one.
void ParameterSync::wait_for_gradients(const Bucket& bucket) const {
  const c10::Stream current = current_stream(bucket.sync->device());
  std::vector<c10::Stream> waited_for;
  for (const size_t index : bucket.parameters) {
    const auto& stream = parameters_[index].stream;
    if (stream && *stream != current && std::find(waited_for.begin(), waited_for.end(), *stream) == waited_for.end()) {
      c10::Event ready(stream->device_type());
      ready.record(*stream);
      ready.block(current);
      waited_for.push_back(*stream);
    }
  }
}

void ParameterSync::send_next() {
  Bucket& bucket = buckets_[next_bucket_];
  if (!is_poisoned_) {
    wait_for_gradients(bucket);
    weight_.use();
  }
  std::vector<at::Tensor> grads;
  std::vector<bool> stand_in;
  grads.reserve(bucket.parameters.size());
  for (const size_t index : bucket.parameters) {
    Parameter& parameter = parameters_[index];
    side_values_.set_flag(parameter.place, is_poisoned_ || parameter.has_new_gradient(),
                          parameter.tensor.grad().defined());
    grads.push_back(is_poisoned_ ? parameter.poison() : parameter.gradient_to_send());
    stand_in.push_back(!side_values_.is_here(parameter.place));
  }
  const c10::Device device = bucket.sync->device();
  const bool ends_step = is_last(bucket);
  const at::Tensor side_values = ends_step ? side_values_to_send(device, grads) : at::Tensor();
  const auto index = static_cast<int>(next_bucket_);
  const Sync sync{compressions_->at(bucket.numel),
                  step_,
                  first_tag(agreement_->number) + index * kTagsPerBucket,
                  num_steps(),
                  /*is_weighted_mean=*/weight_.is_on() && !sums_,
                  weight_.is_on() && !is_poisoned_ ? weight_.factor(device) : at::Tensor()};
  bucket.work = bucket.sync->send(std::move(grads), sync, start_bucket(*bucket.sync), side_values, stand_in);
  next_bucket_ += 1;
  if (ends_step) {
    end_step();
  }
  // While backward goes on, or another bucket is waited for, something else has to see to what follows on the arrival
  // of messages. To wake a thread for the only bucket, at the end of backward, would take longer than to do it here.
  // After a failure nobody waits for it here, perhaps for long.
  if (buckets_.size() > 1 || is_poisoned_ || !device.is_cpu()) {
    BucketWork::drive_later(bucket.work, progress_);
  }
}

at::Tensor ParameterSync::side_values_to_send(c10::Device device, const std::vector<at::Tensor>& grads) {
  if (buffer_values_) {
    side_values_.put(kBuffers, buffer_values_(weight_.is_first_active(group_->getRank(), device)));
    side_values_.make_slots();
  }
  const bool compares_data = num_steps() == 1 && !weight_.is_on();
  auto stamp = agreement_->step_check.stamp(agreement_->number, device, compares_data ? grads : at::TensorList());
  return side_values_.to_send(std::move(stamp), weight_.is_active(), is_poisoned_, device);
}

void ParameterSync::receive() {
  is_under_way_ = false;  // whoever asks waits for this one, which holds the lock
  const auto whatever_fails = c10::make_scope_exit([this] { end(); });
  for (const Bucket& bucket : buckets_) {
    if (!is_poisoned_) {
      bucket.work->receive();
    } else if (bucket.work) {
      bucket.work->discard();
    }
  }
  if (buckets_.empty() || !buckets_.back().work) {
    return;
  }
  side_values_.arrive(buckets_.back().work->side_values(), is_captured());
  if (!is_poisoned_) {
    weight_.use();
    buckets_.back().sync->totals()->wire_bytes += weight_.sent_bytes();
    hand_out();
    means_.clear();
    if (const at::Tensor sums = side_values_.named(); sums.numel() > 0) {
      means_ = side_values_.by_name(weight_.mean(sums, group_->getSize()));
      if (means_.erase(kBuffers) > 0) {
        buffers_arrive_(side_values_.by_name(sums).at(kBuffers));
      }
    }
  }
  agreement_->step_check.arrive(side_values_.stamps());
}

// Ranks agree on new ones. One that has run out of gradients knows of none, but begins to join with the others.
void ParameterSync::piggyback(const std::string& name, const at::Tensor& value) {
  TORCH_CHECK_VALUE(!weight_.is_joining() || !have_agreed() || side_values_.has_slots(name, value), "name: '", name,
                    "' of shape ", value.sizes(), " is new, and ranks that have run out of batches cannot know it: ",
                    "piggyback it on the first sync inside join(), or on an earlier one, on every rank");
  if (!side_values_.has_slots(name, value)) {
    agree_anew(c10::str("piggybacked value '", name, "' is new"));
  }
  side_values_.put(name, value.detach().clone(at::MemoryFormat::Contiguous));
}

void ParameterSync::set_weight(double weight, bool have_hooks) {
  const bool is_again = std::exchange(weighted_step_, step_) == step_;
  for (const Parameter& parameter : parameters_) {
    TORCH_CHECK(
        !parameter.has_left_over() && (have_hooks || !is_again || !parameter.has_own_gradient(/*has_hook=*/false)),
        "fastsync: set_weight() was called after a backward whose gradients, such as that of parameter ",
        parameter.name, ", no sync has averaged yet, and a weight counts for all that a sync averages: call it ",
        "once a step, before the first backward, with the number of the step's tokens or samples, and multiply ",
        "each micro-batch's mean loss by its part of them. Or call zero_grad() before");
  }
  if (!weight_.is_set()) {
    agree_anew("a weight was set");
    for (const Bucket& bucket : buckets_) {
      bucket.sync->set_scale({});  // it has followed other values
    }
  }
  weight_.set(weight);
}

void ParameterSync::set_joining(bool is_joining) {
  agree_anew(is_joining ? "join() began" : "join() ended");
  weight_.set_joining(is_joining);
  agreement_->step_check.say_nothing();
}

// What is decided here is decided by what all ranks know, so that statistics are the same on all.
void ParameterSync::hand_out() {
  for (Bucket& bucket : buckets_) {
    const bool counts_what_arrives = !sums_ && !bucket.work->has_error_feedback();
    bool is_counted = true;
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      Parameter& parameter = parameters_[bucket.parameters[i]];
      const bool exists = !parameter.stand_in.defined() || side_values_.on_some_rank(parameter.place, parameter.name);
      is_counted &= parameter.take_average(exists);
      if (!exists) {
        bucket.sync->feedback().take_back(i);
        // What has arrived is the mean of what is kept. But a sum is not, nor is what error feedback has sent with it.
        if (!counts_what_arrives) {
          parameter.keep(side_values_.is_kept_everywhere(parameter.place));
          is_counted = false;
        }
      }
    }
    if (!is_counted) {
      std::vector<at::Tensor> averages;
      for (const size_t index : bucket.parameters) {
        averages.push_back(parameters_[index].average());
      }
      bucket.sync->measure(averages);
    }
  }
}

void ParameterSync::set_buffers(std::function<std::string()> description,
                                std::function<at::Tensor(const at::Tensor&)> values,
                                std::function<void(const at::Tensor&)> arrive) {
  describe_buffers_ = std::move(description);
  buffers_description_ = describe_buffers_();
  buffer_values_ = std::move(values);
  buffers_arrive_ = std::move(arrive);
}

bool ParameterSync::gradients_are_unchanged() {
  return std::all_of(parameters_.begin(), parameters_.end(), std::mem_fn(&Parameter::is_unchanged));
}

std::vector<at::Tensor> ParameterSync::with_own_gradients(bool have_hooks) {
  std::vector<at::Tensor> found;
  for (const Parameter& parameter : parameters_) {
    if (parameter.has_own_gradient(have_hooks)) {
      found.push_back(parameter.lock());
    }
  }
  return found;
}

void ParameterSync::abandon() {
  try {
    poison();
  } catch (...) {
    if (is_under_way_) {  // else it was refused on all ranks, and is over
      end();
    }
    throw;
  }
  receive();
}

void ParameterSync::end() {
  is_under_way_ = false;
  liveness_->rest();
  step_ += 1;
  for (Parameter& parameter : parameters_) {
    parameter.tensor.reset();
    parameter.stand_in.reset();
  }
  for (Bucket& bucket : buckets_) {
    bucket.work.reset();
  }
}

void ParameterSync::put_sums_back(bool only_lone_ones) {
  for (Parameter& parameter : parameters_) {
    if (!only_lone_ones || !parameter.lock().grad().defined()) {
      parameter.put_sum_back();
    }
  }
}

void ParameterSync::take_over(ParameterSync& other) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].take_over(other.parameters_[i]);
  }
}

// ---- the layout -------------------------------------------------------------------------------------------------

// What is refused is refused on every rank: none is left waiting, and the sync is over. Forward has put buffers where
// it wants them, also one that a checkpoint repeats.
void ParameterSync::prepare() {
  if (describe_buffers_) {
    const std::string before = std::exchange(buffers_description_, describe_buffers_());
    if (buffers_description_ != before) {
      agree_anew("a buffer that is synced is of another shape or dtype");
    }
  }
  try {
    if (!is_laid_out()) {
      lay_out();
    } else if (!have_agreed()) {
      agree(/*init_sync=*/false);
    }
  } catch (const c10::ValueError&) {
    end();
    throw;
  }
}

void ParameterSync::lay_out() {
  if (std::none_of(parameters_.begin(), parameters_.end(), std::mem_fn(&Parameter::takes_part))) {
    return;  // nothing requires a gradient: nothing to send, this time
  }
  agree(/*init_sync=*/false);  // first, for what this rank alone cannot send all have to hear of
  for (const Parameter& parameter : parameters_) {
    const at::ScalarType dtype = grad_dtype_of(parameter.tensor);
    TORCH_CHECK_VALUE(!parameter.takes_part() || (is_supported(parameter.real_dtype()) &&
                                                  (compressions_->is_lossless() || !c10::isComplexType(dtype))),
                      "fastsync: the gradients of parameter ", parameter.name, " are ", dtype,
                      ", which cannot be synchronised with ", compressions_->description);
  }
  const auto layout = layout_of(order_of_rank_0());
  TORCH_CHECK_VALUE(static_cast<int64_t>(layout.size()) <= kMaxBuckets, "fastsync: gradients in ", layout.size(),
                    " buckets, but there may be ", kMaxBuckets, " at most: use a larger bucket_cap_mb");
  std::vector<Bucket> buckets;
  size_t num_places = 0;
  for (const auto& indices : layout) {
    Bucket bucket;
    bucket.parameters = indices;
    std::vector<ParameterId> ids;
    for (const size_t index : indices) {
      Parameter& parameter = parameters_[index];
      parameter.lay_out(buckets.size(), num_places++);
      bucket.numel += parameter.num_reals();
      ids.push_back(parameter.id);
    }
    bucket.sync = add_bucket(std::move(ids), agreement_, "bucket " + std::to_string(buckets.size()),
                             parameters_[indices.front()].device);
    bucket.sync->set_mean_factor(sums_ ? static_cast<double>(group_->getSize()) : 1.0);
    buckets.push_back(std::move(bucket));
  }
  side_values_.lay_out(num_places, group_->getSize());
  newest_buckets_ = known_buckets_;
  buckets_ = std::move(buckets);
}

// The parameters by bucket. Where all gradients take more than a bucket, the first one is full with less, as DDP's is:
// until it is, the network has nothing to do. Buckets come in the order in which their last parameters do, so that the
// one that is ready first is sent first.
std::vector<std::vector<size_t>> ParameterSync::layout_of(const std::vector<int64_t>& order) const {
  std::vector<at::Tensor> tensors;
  size_t bytes = 0;
  for (const int64_t index : order) {
    tensors.push_back(parameters_[index].outline());
    bytes += tensors.back().nbytes();
  }
  const auto cap = static_cast<size_t>(bucket_cap_bytes_);
  std::vector<size_t> caps{cap};
  if (bytes > cap) {
    caps.insert(caps.begin(), std::min<size_t>(cap, c10d::kDefaultFirstBucketBytes));
  }
  std::vector<int64_t> positions(order.size());  // in the order: given, the buckets are not put in another one
  std::iota(positions.begin(), positions.end(), 0);
  auto layout = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, caps, {}, positions));
  std::sort(layout.begin(), layout.end(), [](const auto& a, const auto& b) { return a.back() < b.back(); });
  for (auto& bucket : layout) {
    std::transform(bucket.begin(), bucket.end(), bucket.begin(), [&](size_t position) { return order[position]; });
  }
  return layout;
}

// Rank 0's order for all, of those that take part: that in which its gradients got ready, then, from the last parameter
// to the first, those it has no gradient for.
std::vector<int64_t> ParameterSync::order_of_rank_0() {
  std::vector<int64_t> order(order_.begin(), order_.end());
  for (size_t index = parameters_.size(); index-- > 0;) {
    if (!parameters_[index].is_ready) {
      order.push_back(static_cast<int64_t>(index));
    }
  }
  std::erase_if(order, [&](int64_t index) { return !parameters_[index].takes_part(); });
  const WithoutPythonObjects without_python;
  const c10::Device device = parameters_[order.front()].tensor.device();
  std::vector<at::Tensor> tensors{at::tensor(at::ArrayRef<int64_t>(order)).to(device)};
  wait_for_ranks("agreement on the order of gradients", [&] { group_->broadcast(tensors)->wait(); });
  const at::Tensor of_rank_0 = tensors.front().cpu();
  return {of_rank_0.data_ptr<int64_t>(), of_rank_0.data_ptr<int64_t>() + of_rank_0.numel()};
}

void ParameterSync::forget_layout() {
  for (const Bucket& bucket : buckets_) {
    saved_.record_scale(bucket.sync->parameters, bucket.sync->scale());
  }
  forget_buckets([](const BucketSync& /*bucket*/) { return true; });
  for (Parameter& parameter : parameters_) {
    parameter.bucket = Parameter::kNone;
  }
  buckets_.clear();
}

void ParameterSync::agree(bool init_sync) {
  c10::Device device = c10::kCPU;
  std::ostringstream text;
  text << (agreement_->number < 0 ? "a new engine" : c10::str("engine ", agreement_->number)) << "\ninit_sync "
       << (init_sync ? "True" : "False") << "\nbucket_cap_mb " << static_cast<double>(bucket_cap_bytes_) / (1 << 20)
       << "\nop " << (sums_ ? "sum" : "mean") << (weight_.is_on() ? ", weighted\n" : "\n") << buffers_description_;
  for (const Parameter& parameter : parameters_) {
    const at::Tensor tensor = parameter.lock();
    text << "parameter " << parameter.name << " of shape " << tensor.sizes() << ", strides " << tensor.strides() << ", "
         << tensor.scalar_type();
    if (const at::ScalarType dtype = grad_dtype_of(tensor); dtype != tensor.scalar_type()) {
      text << ", gradients of " << dtype;
    }
    text << (tensor.requires_grad() ? "" : ", frozen") << "\n";
    device = tensor.device();
  }
  text << side_values_.newcomers();
  EngineState::agree(*agreement_, "agreement", compressions_, step_, text.str(), device);
  side_values_.make_slots();
  if (!is_under_way_) {
    liveness_->rest();
  }
}

}  // namespace fastsync
