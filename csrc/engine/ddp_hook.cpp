#include "engine/ddp_hook.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <unordered_set>

#include "transport/agreement.h"

namespace fastsync {

using c10::ivalue::Future;

namespace {

void check_buffer(const at::Tensor& buffer, const std::string& name) {
  TORCH_CHECK_VALUE(buffer.layout() == at::kStrided, "fastsync: ", name,
                    " holds a sparse gradient, which fastsync does ",
                    "not handle; use sparse=False in the embedding, or DDP without a fastsync hook");
  TORCH_CHECK_VALUE(is_supported(buffer.scalar_type()), "fastsync: ", name, " holds ", buffer.scalar_type(),
                    " gradients; fastsync handles float32, float64, float16 and bfloat16 (DDP hands over complex "
                    "gradients as real ones)");
}

std::string describe(const c10d::GradBucket& bucket, const std::string& name, const Schedule& schedule, int64_t step,
                     const std::string& saved_scales) {
  std::ostringstream text;
  text << schedule.description() << "\nstep " << step << "\n" << saved_scales << "\n";
  text << name << " with " << bucket.getBuffer().numel() << " elements of " << bucket.getBuffer().scalar_type() << "\n";
  const auto parameters = bucket.getParameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    text << "parameter " << i << " of " << name << " of shape " << parameters[i].sizes() << "\n";
  }
  return text.str();
}

// The whole buffer is one gradient as far as the passes are concerned, except where each has blocks or a residual of
// its own.
std::vector<at::Tensor> gradients_of(const c10d::GradBucket& bucket, const Compression& compression,
                                     const BucketSync& sync) {
  if (compression.wire != Wire::kInt8 && !compression.error_feedback && !sync.feedback().has_residuals()) {
    return {bucket.getBuffer().view({-1})};
  }
  return bucket.getGradients();
}

}  // namespace

HookState::HookState(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), whereabouts_(Whereabouts::of(*group_, "a DDP hook")) {}

std::shared_ptr<const Schedule> HookState::schedule() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return schedule_;
}

void HookState::set_schedule(std::shared_ptr<const Schedule> schedule) {
  const std::lock_guard<std::mutex> lock(mutex_);
  schedule_ = std::move(schedule);
  disagree("its compression was set");
}

// The ranks check anew that they agree.
void HookState::disagree(const char* why) {
  for (const auto& [parameter, bucket] : buckets_) {
    bucket->agreed.reset();
    bucket->why_agree = why;
  }
}

int64_t HookState::step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return step_ + 1;
}

void HookState::set_step(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step - 1;
}

c10::intrusive_ptr<Future> HookState::run(c10d::GradBucket& grad_bucket, std::shared_ptr<const Schedule> schedule) {
  const at::Tensor buffer = grad_bucket.getBuffer();
  check_buffer(buffer, "bucket " + std::to_string(grad_bucket.getIndex()));
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Bucket> bucket = find_or_add(grad_bucket);
  // DDP sends its buckets in order. A backward that failed leaves the rest out.
  const bool is_first = !step_is_open_ || grad_bucket.getIndex() <= last_index_;
  step_ += is_first ? 1 : 0;
  is_captured_ = is_capturing(buffer.device());
  if (bucket->agreed != schedule) {
    agree(*bucket, grad_bucket, schedule);
  }
  if (is_first) {
    step_buckets_.clear();
    times_.begin_step();
    num_steps_ += 1;
  }
  step_is_open_ = !grad_bucket.isLast();
  last_index_ = grad_bucket.getIndex();
  step_buckets_.push_back(bucket);
  const Sync sync{compression_for(*schedule, step_, buffer.numel(), buffer.device()), step_,
                  static_cast<int64_t>(grad_bucket.getIndex()), first_tag(bucket->number), grad_bucket.isLast()};
  auto grads = gradients_of(grad_bucket, sync.compression, *bucket->sync);
  Extras extras;
  if (grad_bucket.isLast()) {
    const bool has_room = bucket->sync->has_room(grads, sync.compression);
    extras.flags = stamp(*bucket, grad_bucket.getParameters(), buffer.device(), has_room);
  }
  auto future = bucket->sync->sync(buffer, std::move(grads), sync,
                                   times_.start_bucket(bucket->sync->totals(), buffer.device()), strand_, extras,
                                   [pairing = bucket->pairing](const at::Tensor& flags) { pairing->arrive(flags); });
  if (grad_bucket.isLast()) {
    times_.end_step();
  }
  return future;
}

void HookState::note_update() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [parameter, bucket] : buckets_) {
    bucket->pairing->note_update();
  }
}

// Undefined in most steps where it takes a copy from the host or a collective of its own: alike on all ranks.
at::Tensor HookState::stamp(Bucket& bucket, const std::vector<at::Tensor>& parameters, c10::Device device,
                            bool has_room) {
  constexpr int64_t kOneOf = 16;
  std::vector<uint32_t> versions;
  std::transform(parameters.begin(), parameters.end(), std::back_inserter(versions),
                 [](const at::Tensor& parameter) { return parameter._version(); });
  // DDP calls the hook outside of a backward for a rank that has run out of inputs, with zeros.
  const bool has_gradients = torch::autograd::get_current_graph_task_id() != -1;
  bucket.pairing->begin_step(step_, std::move(versions), has_gradients);
  const bool is_cheap = device.is_cpu() && has_room;
  if (group_->getSize() == 1 || (!is_cheap && bucket.num_stamps++ % kOneOf != 0) || is_captured_) {
    return {};
  }
  const std::vector<float> stamp = bucket.pairing->stamp(bucket.number);
  const at::Tensor on_host =
      at::empty({static_cast<int64_t>(stamp.size())}, at::TensorOptions().pinned_memory(!device.is_cpu()));
  std::copy(stamp.begin(), stamp.end(), on_host.data_ptr<float>());
  return on_host.to(device, /*non_blocking=*/true);
}

// A bucket is what is in it. Its index is no identity, because DDP regroups its buckets after the first backward, nor
// is its buffer, because hooks wrapped around this one hand over buffers of their own.
std::shared_ptr<HookState::Bucket> HookState::find_or_add(c10d::GradBucket& grad_bucket) {
  const auto parameters = grad_bucket.getParameters();
  const auto same = [](const ParameterId& id, const at::Tensor& parameter) {
    return id._unsafe_get_target() == parameter.unsafeGetTensorImpl();
  };
  const auto* key = parameters.front().unsafeGetTensorImpl();
  if (const auto found = buckets_.find(key); found != buckets_.end()) {
    const auto& ids = found->second->parameters;
    if (std::equal(ids.begin(), ids.end(), parameters.begin(), parameters.end(), same)) {
      return found->second;
    }
  }
  forget_buckets_of(parameters);
  auto bucket = std::make_shared<Bucket>();
  for (const at::Tensor& parameter : parameters) {
    bucket->parameters.emplace_back(parameter.getIntrusivePtr());
  }
  bucket->pairing = std::make_shared<Pairing>(*group_, "DDP's bucket " + std::to_string(grad_bucket.getIndex()));
  bucket->sync = std::make_shared<BucketSync>(group_, "bucket " + std::to_string(grad_bucket.getIndex()),
                                              grad_bucket.getBuffer().device(), whereabouts_);
  bucket->sync->set_scale(saved_scales_.smallest_of(bucket->parameters, grad_bucket.getBuffer().device()));
  bucket->sync->feedback().set_residuals(saved_residuals_.take(bucket->parameters, grad_bucket.getBuffer().device()));
  buckets_[key] = bucket;
  return bucket;
}

// A parameter is in one bucket: those that held one of these are no more, nor are those of models that are gone.
void HookState::forget_buckets_of(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const c10::TensorImpl*> moved;
  for (const at::Tensor& parameter : parameters) {
    moved.insert(parameter.unsafeGetTensorImpl());
  }
  std::erase_if(buckets_, [&](const auto& entry) {
    const auto& ids = entry.second->parameters;
    const bool is_dead = std::any_of(ids.begin(), ids.end(), [&](const ParameterId& id) {
      return id.expired() || moved.count(id._unsafe_get_target()) != 0;
    });
    if (is_dead) {
      saved_residuals_.record(ids, entry.second->sync->feedback().residuals());
      forgotten_totals_.add(entry.second->sync->totals());
    }
    return is_dead;
  });
  saved_scales_.forget_dead_parameters();
}

void HookState::agree(Bucket& bucket, c10d::GradBucket& grad_bucket, const std::shared_ptr<const Schedule>& schedule) {
  const auto name = "bucket " + std::to_string(grad_bucket.getIndex());
  // DDP hands over complex gradients as the floats they are made of, so the buffer does not tell.
  for (const at::Tensor& parameter : grad_bucket.getParameters()) {
    TORCH_CHECK_VALUE(schedule->is_lossless() || !parameter.is_complex(), "fastsync: ", name, " holds ",
                      parameter.scalar_type(), " gradients, which cannot travel with ", schedule->description(),
                      "; use compression='none'");
  }
  whereabouts_->agree(step_, bucket.why_agree);
  try {
    const auto text = describe(grad_bucket, name, *schedule, step_, saved_scales_.description());
    bucket.number = check_agreement(group_, text, grad_bucket.getBuffer().device());
  } catch (const c10::ValueError&) {
    whereabouts_->rest();
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "fastsync: agreement on ", name, " failed on rank ", group_->getRank(), " of ",
                group_->getSize(), ": ", error.what(), whereabouts_->roll_call());
  }
  bucket.agreed = schedule;
}

void HookState::look_at_pairings() {
  for (const auto& [parameter, bucket] : buckets_) {
    bucket->pairing->look();
  }
}

at::Tensor HookState::grad_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  look_at_pairings();
  TORCH_CHECK(!step_buckets_.empty(),
              "fastsync: no gradients have been synchronised yet; statistics come with a backward()");
  std::vector<at::Tensor> rows;
  for (const auto& bucket : step_buckets_) {
    rows.push_back(bucket->sync->stats().to(step_buckets_.front()->sync->stats().device(), /*non_blocking=*/true));
  }
  return at::stack(rows);
}

bool HookState::is_captured() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_captured_;
}

int64_t HookState::num_steps() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_steps_;
}

SyncTotals HookState::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  look_at_pairings();
  SyncTotals totals = times_.totals();
  for (const auto& bucket : step_buckets_) {
    totals.buckets.push_back(*bucket->sync->totals());
  }
  totals.all = forgotten_totals_.sum();
  for (const auto& [parameter, bucket] : buckets_) {
    totals.all.add(*bucket->sync->totals());
  }
  totals.num_steps = num_steps_;
  return totals;
}

std::vector<ParameterScale> HookState::scales() {
  const std::lock_guard<std::mutex> lock(mutex_);
  look_at_pairings();
  ParameterScales newest = saved_scales_;  // which hold until their parameters' buckets have been synchronised
  for (const auto& [key, bucket] : buckets_) {
    newest.record(bucket->parameters, bucket->sync->scale());
  }
  return newest.list();
}

void HookState::set_scales(const std::vector<ParameterScale>& scales) {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_scales_ = ParameterScales(scales);
  for (const auto& [key, bucket] : buckets_) {
    bucket->sync->set_scale(saved_scales_.smallest_of(bucket->parameters, bucket->sync->device()));
  }
  disagree("a state was loaded");
}

std::vector<ParameterResidual> HookState::residuals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ParameterResiduals newest = saved_residuals_;
  for (const auto& [key, bucket] : buckets_) {
    newest.record(bucket->parameters, bucket->sync->feedback().residuals());
  }
  return newest.list();
}

void HookState::set_residuals(const std::vector<ParameterResidual>& residuals) {
  const std::lock_guard<std::mutex> lock(mutex_);
  saved_residuals_ = ParameterResiduals(residuals);
  for (const auto& [key, bucket] : buckets_) {
    bucket->sync->feedback().set_residuals(saved_residuals_.take(bucket->parameters, bucket->sync->device()));
  }
}

namespace {

class Hook : public c10d::CppCommHookInterface<std::shared_ptr<HookState>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    return state_->run(bucket, state_->schedule());
  }
};

}  // namespace

void register_hook(c10d::Reducer& reducer, std::shared_ptr<HookState> state) {
  reducer.register_comm_hook(std::make_unique<Hook>(std::move(state)));
}

}  // namespace fastsync
