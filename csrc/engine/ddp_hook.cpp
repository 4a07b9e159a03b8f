#include "engine/ddp_hook.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "engine/backward.h"
#include "engine/gradient.h"
#include "passes/backend.h"
#include "transport/without_python_objects.h"

namespace fastsync {

using c10::ivalue::Future;

namespace {

std::string name_of(const c10d::GradBucket& bucket) { return "bucket " + std::to_string(bucket.getIndex()); }

// Throws if the bucket cannot be sent. It comes after the agreement, so that all ranks throw. DDP hands over complex
// gradients as the floats that they are made of, so only the parameters tell.
void check(const c10d::GradBucket& bucket, const std::vector<at::Tensor>& parameters,
           const CompressionTable& compressions) {
  const at::Tensor& buffer = bucket.getBuffer();
  TORCH_CHECK_VALUE(buffer.layout() == at::kStrided || is_sparse_by_rows(buffer), "fastsync: ", name_of(bucket),
                    " holds a gradient that is sparse, but not by rows; use sparse=False where it ",
                    "comes from, or DDP without a fastsync hook");
  TORCH_CHECK_VALUE(is_supported(buffer.scalar_type()), "fastsync: ", name_of(bucket), " holds ", buffer.scalar_type(),
                    " gradients; fastsync handles float32, float64, float16, bfloat16 and, as pairs of these, complex");
  for (const at::Tensor& parameter : parameters) {
    TORCH_CHECK_VALUE(!parameter.is_complex() || compressions.is_lossless(), "fastsync: ", name_of(bucket), " holds ",
                      parameter.scalar_type(), " gradients, which cannot travel with ", compressions.description,
                      "; use compression='none'");
  }
}

// DDP gives each sparse gradient a bucket of its own.
std::vector<at::Tensor> gradients_of(const c10d::GradBucket& bucket) {
  return bucket.getBuffer().is_sparse() ? std::vector{bucket.getBuffer()} : bucket.getGradients();
}

// The passes take the whole buffer for one gradient, unless each gradient has blocks or a residual of its own. The
// compression decides that, because it is the same on all ranks.
std::vector<at::Tensor> gradients_to_send(const c10d::GradBucket& bucket, const Compression& compression) {
  const bool is_of_blocks = compression.wire && unit_of(*compression.wire).values > 1;
  return is_of_blocks || compression.error_feedback || bucket.getBuffer().is_sparse()
             ? gradients_of(bucket)
             : std::vector{bucket.getBuffer().dim() == 1 ? bucket.getBuffer() : bucket.getBuffer().view({-1})};
}

}  // namespace

c10::intrusive_ptr<Future> HookState::run(c10d::GradBucket& grad_bucket,
                                          std::shared_ptr<const CompressionTable> compressions) {
  check_not_forked("build the model, DDP and the hook in the process that trains");
  const at::Tensor buffer = grad_bucket.getBuffer();
  std::unique_lock<std::mutex> lock(mutex_);
  // A bucket is known by its parameters. Its index changes when DDP regroups its buckets after the first backward, and
  // hooks wrapped around this one hand over buffers of their own.
  const auto parameters = grad_bucket.getParameters();
  const auto bucket = buckets_.find_or_add(parameters, name_of(grad_bucket), buffer.device());
  bucket->set_mean_factor(sums_ ? static_cast<double>(group_->getSize()) : 1.0);
  // DDP sends its buckets in order, but leaves out the rest after a backward has failed.
  const bool is_first = !newest_index_ || grad_bucket.getIndex() <= *newest_index_;
  const bool is_last = grad_bucket.isLast();
  if (is_first) {
    take_number();
  }
  agree_on_bucket(*bucket, name_of(grad_bucket), compressions,
                  [&] { return describe_settings() + describe(grad_bucket); });
  check(grad_bucket, parameters, *compressions);
  if (is_first) {
    buckets_.clear_newest();
    averaged_.clear();
    if (waiting_graph_task_ != current_graph_task()) {
      waiting_.clear();  // a backward that failed has left them
    }
    begin_step();
    send_weight(*bucket);
  }
  newest_index_ = is_last ? std::nullopt : std::optional(grad_bucket.getIndex());
  buckets_.add_newest(bucket);
  const auto work = send(*bucket, grad_bucket, compressions->at(buffer.numel()));
  if (is_last) {
    end_step();
  }
  const WithoutPythonObjects without_python;
  auto future = make_future(buffer.device());
  auto complete = [work, buffer, future, agreement = bucket->agreement, liveness = is_last ? liveness_ : nullptr,
                   weights = weight_check()] {
    try {
      work->receive();
      if (liveness) {
        liveness->note_rest();
      }
      agreement->step_check.arrive(work->side_values(), weights.get());
    } catch (...) {
      future->setError(std::current_exception());
      return;
    }
    future->markCompleted(c10::IValue(buffer));
  };
  // Backward hides nothing of it, and no bucket of another model waits for it.
  const bool is_alone = is_first && is_last && bucket->device().is_cpu() && waiting_.empty();
  if (is_alone || group_->getSize() == 1) {
    lock.unlock();
    complete();
    return future;
  }
  complete_later(work, bucket->device(), std::move(complete), is_last);
  return future;
}

// Note [Receives that send]
//   What the receive of a low rank or a sparse bucket sends has to come after all that backward sends, in one order on
//   all ranks. So it waits for the last bucket, and with it all buckets behind it. Several models may share a state and
//   a backward. Then the last bucket of one is not the last that backward sends, so they wait for the end of backward.
//   DDP waits for its futures later, because it queues its own callback after it has handed over its last bucket.
void HookState::complete_later(const std::shared_ptr<BucketWork>& work, c10::Device device,
                               std::function<void()> complete, bool is_last) {
  BucketWork::drive_later(work, progress_);
  waiting_.push_back(at::wrapPropagateTLSState(std::move(complete)));
  if (waiting_.size() == 1 && !work->receive_sends()) {
    post_waiting(device);
    return;
  }
  waiting_graph_task_ = current_graph_task();
  if (!is_last) {
    return;
  }
  if (waiting_graph_task_ == kNoGraphTask) {
    post_waiting(device);
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), device] {
    if (const auto self = weak.lock()) {
      const std::lock_guard<std::mutex> lock(self->mutex_);
      self->post_waiting(device);
    }
  });
}

void HookState::post_waiting(c10::Device device) {
  for (auto& each : std::exchange(waiting_, {})) {
    progress_.post(device, std::move(each));
  }
}

std::shared_ptr<BucketWork> HookState::send(Bucket& bucket, c10d::GradBucket& grad_bucket,
                                            const Compression& compression) {
  const auto stopwatch = start_bucket(bucket);
  SendOptions options{compression, step_under_way(), first_tag(bucket.agreement->number)};
  options.in_place = true;
  options.needs_stats = needs_stats();
  if (weights_) {
    weights_->wait_on_stream();
    options.is_weighted_mean = !sums_;
    options.weight = weights_->factor(bucket.device());
  }
  const at::Tensor side_values = grad_bucket.isLast() ? stamp(bucket, grad_bucket) : at::Tensor();
  return bucket.send(gradients_to_send(grad_bucket, compression), options, stopwatch, side_values);
}

// ---- what ranks agree on --------------------------------------------------------------------------------------------

std::string HookState::describe(const c10d::GradBucket& bucket) const {
  std::ostringstream text;
  const at::Tensor& buffer = bucket.getBuffer();
  text << name_of(bucket) << " with " << buffer.numel() << " elements of " << buffer.scalar_type()
       << (buffer.layout() == at::kStrided ? "" : ", sparse") << "\n";
  const auto parameters = bucket.getParameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto named = names_.find(parameters[i].unsafeGetTensorImpl());
    text << "parameter " << i << " of " << name_of(bucket) << (named == names_.end() ? "" : ", " + named->second + ",")
         << " of shape " << parameters[i].sizes() << ", " << parameters[i].scalar_type() << "\n";
  }
  return text.str();
}

void HookState::compare_names(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    names_.emplace(parameters[i].unsafeGetTensorImpl(), names[i]);
  }
}

// ---- weights and sums -----------------------------------------------------------------------------------------------

std::string HookState::describe_settings() const {
  return c10::str("op ", sums_ ? "sum" : "mean", weight_.is_on() ? ", weighted\n" : "\n");
}

void HookState::set_weight(double weight, const std::vector<at::Tensor>& parameters,
                           const std::vector<std::string>& names) {
  if (std::exchange(weighted_step_, step()) == step()) {
    std::unordered_map<const c10::TensorImpl*, Snapshot> averaged;
    for (const auto& [id, snapshot] : averaged_) {
      averaged.emplace(id._unsafe_get_target(), snapshot);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (averaged[parameters[i].unsafeGetTensorImpl()].was_written_by_autograd(parameters[i].grad())) {
        refuse_late_weight(names[i]);
      }
    }
  }
  if (!weight_.is_set()) {
    begin_weights();
  }
  weight_.set(weight);
}

// DDP wants a future for each bucket at once, and hands the buckets over in one order on all ranks. So a rank waits for
// the weights before its first bucket is packed.
void HookState::send_weight(Bucket& bucket) {
  weights_.reset();
  if (!weight_.is_on()) {
    return;
  }
  // DDP calls the hook outside of a backward for a rank that has run out of inputs, with zeros.
  weight_.set_active(current_graph_task() != kNoGraphTask);
  liveness_->note_averaging(step_under_way());
  wait_for_ranks(kAddingWeights, [&] {
    weights_.emplace(weight_, sums_, *group_, bucket.device(), /*has_failed=*/false);
    weights_->wait();
  });
  bucket.totals()->wire_bytes += weights_->sent_bytes();
}

// Note [Sums of a DDP hook]
//   DDP puts all of .grad into a bucket, also what was there before backward. If that is the sum of the step before,
//   each rank would count it once more. So .grad has to be undefined by then. The first gradient after a step looks at
//   all parameters, because DDP also sends those that a backward does not reach. Later ones do not look: inside
//   no_sync() gradients are meant to add up.
void HookState::watch_sums(const std::shared_ptr<HookState>& self, const std::vector<at::Tensor>& parameters) {
  for (size_t index = 0; index < parameters.size(); ++index) {
    self->sum_hooks_.push_back(GradientHook::put_on(parameters[index], index, self, /*must_run=*/false));
  }
}

void HookState::before_gradient(size_t /*index*/) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_checked_sums_) {
    return;
  }
  for (const auto& each : averaged_) {
    const at::Tensor parameter(each.first.lock());
    TORCH_CHECK(!parameter.defined() || !parameter.grad().defined(), "fastsync.register_comm_hook: .grad still ",
                "holds what the step before has left there, and with op=\"sum\" each rank would add that once more: ",
                "call zero_grad() before backward(), so that .grad is None. Several averaged backwards a step are for ",
                "fastsync.attach(model, op=\"sum\")");
  }
  has_checked_sums_ = true;
}

// ---- after a step ---------------------------------------------------------------------------------------------------

void HookState::note_update() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& bucket : buckets_.all()) {
    bucket->agreement->step_check.note_update();
  }
}

// Once DDP has handed over its last bucket, it queues its copying for the end of backward. A callback that is queued
// from another callback comes after that.
void HookState::note_gradients_later(const std::shared_ptr<HookState>& self) {
  if (current_graph_task() == kNoGraphTask) {
    return;  // DDP calls the hook outside of a backward for a rank that has run out of inputs
  }
  auto& autograd = torch::autograd::Engine::get_default_engine();
  autograd.queue_callback([self, &autograd] { autograd.queue_callback([self] { self->note_gradients(); }); });
}

void HookState::note_gradients() {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_checked_sums_ = false;
  averaged_.clear();
  for (const auto& bucket : buckets_.newest()) {
    for (const ParameterId& id : bucket->parameters) {
      if (const at::Tensor parameter(id.lock()); parameter.defined()) {
        averaged_.emplace_back(id, Snapshot(parameter.grad()));
      }
    }
  }
}

void HookState::let_go() {
  const std::lock_guard<std::mutex> lock(mutex_);
  averaged_.clear();
  sum_hooks_.clear();
}

bool HookState::gradients_are_unchanged() {
  return !averaged_.empty() && std::ranges::all_of(averaged_, [](const auto& each) {
    const at::Tensor parameter(each.first.lock());
    return !parameter.defined() || each.second.is_still(parameter.grad());
  });
}

// Returns the stamp of the step check. It is undefined if none travels in this step, which is the same on all ranks.
at::Tensor HookState::stamp(Bucket& bucket, c10d::GradBucket& grad_bucket) {
  // DDP calls the hook outside of a backward for a rank that has run out of inputs, with zeros.
  const bool has_gradients = current_graph_task() != kNoGraphTask;
  const c10::Device device = bucket.device();
  StepCheck& step_check = bucket.agreement->step_check;
  step_check.begin_step(step_under_way(), has_gradients);
  const bool compares_data = num_steps() == 1 && !weight_.is_on();
  const auto grads = compares_data ? gradients_of(grad_bucket) : std::vector<at::Tensor>();
  const auto stamp = step_check.stamp(bucket.agreement->number, device, grads, weight_check().get(), bucket.has_plan());
  return stamp && !stamp->empty() ? to_device(*stamp, device) : at::Tensor();
}

struct HookPlace::Content {
  explicit Content(c10::intrusive_ptr<c10d::ProcessGroup> own_group) : group(std::move(own_group)) {}

  std::shared_ptr<HookState> get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return state;
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::mutex mutex;
  std::shared_ptr<HookState> state;
};

namespace {

// As torch's AllReduceCommHook, which its library does not export.
c10::intrusive_ptr<Future> all_reduce(c10d::ProcessGroup& group, c10d::GradBucket& bucket) {
  std::vector<at::Tensor> buffers = {bucket.getBuffer()};
  buffers.front().div_(group.getSize());
  return group.allreduce(buffers)->getFuture();
}

template <typename Content>
class Hook : public c10d::CppCommHookInterface<std::shared_ptr<Content>> {
 public:
  using c10d::CppCommHookInterface<std::shared_ptr<Content>>::CppCommHookInterface;

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override {
    const auto state = this->state_->get();
    if (!state) {
      return all_reduce(*this->state_->group, bucket);
    }
    if (bucket.isLast()) {
      HookState::note_gradients_later(state);
    }
    return state->run(bucket, state->locked([&] { return state->compressions(); }));
  }
};

}  // namespace

HookPlace::HookPlace(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::ProcessGroup> group)
    : content_(std::make_shared<Content>(std::move(group))) {
  reducer.register_comm_hook(std::make_unique<Hook<Content>>(content_));
}

void HookPlace::put(std::shared_ptr<HookState> state) {
  TORCH_CHECK(current_graph_task() == kNoGraphTask, "fastsync: detach() was called inside a backward; call it after");
  {
    const std::lock_guard<std::mutex> lock(content_->mutex);
    std::swap(content_->state, state);
  }
  if (state) {  // the one before
    state->let_go();
  }
}

std::vector<bool> are_in_reducers(const std::vector<at::Tensor>& parameters) {
  // A Reducer keeps the accumulators of its parameters alive, and takes its hooks off when it ends. Among what puts
  // hooks on accumulators, it alone has hooks of this class; Python's, and ours, are of other ones.
  const auto is_of_reducer = [](const auto& hook) {
    return dynamic_cast<const torch::autograd::utils::LambdaPostHook*>(hook.get()) != nullptr;
  };
  std::vector<bool> are;
  for (const at::Tensor& parameter : parameters) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    are.push_back(accumulator && std::ranges::any_of(accumulator->post_hooks(), is_of_reducer));
  }
  return are;
}

}  // namespace fastsync
