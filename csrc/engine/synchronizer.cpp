#include "engine/synchronizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "engine/attached_engines.h"
#include "passes/backend.h"

namespace fastsync {

namespace {

constexpr auto kInChild = "call detach() in the child";

const char* word_for(Op op) { return op == Op::kSum ? "sum" : op == Op::kMeanOfUsed ? "mean_of_used" : "mean"; }

void check_outside_backward(const char* caller) {
  TORCH_CHECK(current_graph_task() == kNoGraphTask, "fastsync: ", caller,
              " was called inside a backward; call it after");
}

}  // namespace

Synchronizer::Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                           c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, Op op,
                           const std::set<std::string>& sparse)
    : EngineState(group, "the engine of parameter " + names.front(), "with sync.join():"),
      bucket_cap_bytes_(bucket_cap_bytes),
      op_(op),
      agreement_(std::make_shared<Agreement>(*group, "the engine of parameter " + names.front())),
      is_on_cpu_(std::ranges::all_of(parameters, [](const at::Tensor& parameter) { return parameter.is_cpu(); })),
      backward_([this] { return is_under_way_.load(); }, &finalize_backward, &send_leftovers) {
  needs_stats_ = false;  // until somebody asks
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool is_sparse = sparse.contains(names[i]);
    parameters_.emplace_back(parameters[i], std::move(names[i]), op, is_sparse);
  }
}

Synchronizer::~Synchronizer() {
  if (!is_forked()) {  // in a forked child another thread's locks stay locked
    take_hooks_off();
  }
}

void Synchronizer::attach(const std::vector<at::Tensor>& parameters, bool overlap) {
  overlaps_ = overlap;
  if (!overlap && !sums()) {
    return;  // hooks would have nothing to tell
  }
  for (size_t index = 0; index < parameters.size(); ++index) {
    hooks_.push_back(GradientHook::put_on(parameters[index], index, weak_from_this(), /*must_run=*/overlap));
  }
  if (overlap) {
    AttachedEngines::all().add(*this, parameters);
  }
}

void Synchronizer::take_hooks_off() {
  AttachedEngines::all().remove(*this);
  hooks_.clear();
}

void Synchronizer::detach() {
  check_outside_backward("detach()");
  if (!is_forked()) {
    wait_for_backward("detach()");
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  take_hooks_off();
  overlaps_ = false;
  const at::NoGradGuard no_grad;
  put_sums_back(/*only_lone_ones=*/false);
}

void Synchronizer::end_interrupted() {
  if (current_graph_task() == kNoGraphTask) {
    abandon_interrupted();
  }
}

// When the error of a backward has arrived here, a device's thread may still keep that backward alive for a moment.
void Synchronizer::wait_for_backward(const char* caller) const {
  constexpr std::chrono::seconds kLimit(1);
  constexpr std::chrono::milliseconds kPause(1);
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (is_under_way_ && !backward_.is_interrupted()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "fastsync: ", caller,
                " was called while another thread's ", "backward is under way; call it after");
    std::this_thread::sleep_for(kPause);
  }
}

// ---- backward -----------------------------------------------------------------------------------------------------

void Synchronizer::before_gradient(size_t index) {
  if (!sums()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  parameters_[index].put_sum_aside();
}

void Synchronizer::after_gradient(size_t index, const at::Tensor& tensor, bool is_gone) {
  const bool is_entered = backward_.is_entered();
  if (!is_entered && backward_.is_interrupted()) {
    check_not_forked(kInChild);
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  Parameter& parameter = parameters_[index];
  parameter.note_gradient(tensor);
  if (!overlaps_) {
    return;
  }
  TORCH_CHECK_VALUE(!is_gone, "fastsync: the gradient of ", parameter.name,
                    " was gone as soon as backward had made it, before the ranks could average it. ",
                    "Does an optimizer step inside backward (register_post_accumulate_grad_hook, ",
                    "_apply_optimizer_in_backward)? Ranks would drift apart: step after backward");
  if (!is_entered) {
    Backward::enter({shared_from_this(), &backward_});  // first, for a step that nobody owns looks interrupted
  }
  if (!is_enabled_) {
    parameter.mark_new(/*left_over=*/true);
    return;
  }
  if (!is_under_way_) {
    check_not_forked(kInChild);
    begin();
  }
  step_->mark_ready(index);
  if (is_first_) {
    step_->send_full_buckets();
  }
}

// Engines that take part in one backward end together. No engine waits before all have sent. Otherwise ranks on which
// engines come in different orders would wait for each other. If an engine fails, no rank is kept waiting by any
// engine.
void Synchronizer::finalize_backward(int graph_task) {
  const at::NoGradGuard no_grad;
  const auto engines = AttachedEngines::all().in_order();
  std::exception_ptr error;
  const auto for_each = [&](const auto& call) {
    for (const auto& engine : engines) {
      if (engine->backward_.ends_with(graph_task)) {
        const std::lock_guard<std::mutex> lock(engine->mutex_);
        try {
          call(*engine);
        } catch (...) {
          error = error ? error : std::current_exception();
        }
      }
    }
  };
  for_each([&](Synchronizer& engine) {
    try {
      engine.send_rest();
    } catch (...) {
      error = error ? error : std::current_exception();
      if (engine.is_under_way_) {  // else it was refused on all ranks
        engine.fail_and_send_rest();
      }
    }
  });
  for_each([](Synchronizer& engine) { engine.end()->receive(); });
  if (error) {
    std::rethrow_exception(error);
  }
}

// A backward that raised never calls finalize_backward. This makes the call with all interrupted engines, because the
// order counts here, too.
void Synchronizer::for_each_interrupted(const std::function<void(Synchronizer&)>& call) {
  const at::NoGradGuard no_grad;
  for (const auto& engine : AttachedEngines::all().in_order()) {
    if (!engine->is_forked() && engine->backward_.is_interrupted()) {
      const std::lock_guard<std::mutex> lock(engine->mutex_);
      if (engine->backward_.is_interrupted()) {  // no other thread has ended it first
        call(*engine);
      }
    }
  }
}

// Sends what is left while backward's error is on its way to the user. With a device the graph task may end on another
// thread, when the user's thread has gone on. Then the next backward sends what is left.
void Synchronizer::send_leftovers() {
  for_each_interrupted([](Synchronizer& engine) {
    try {
      if (engine.is_on_cpu_) {
        engine.put_sums_back(/*only_lone_ones=*/true);
        engine.fail_and_send_rest();
      } else {
        engine.step_->join_streams();
      }
    } catch (...) {
      // The next sync tries again, or is refused on all ranks, as this one was.
    }
  });
}

void Synchronizer::abandon_interrupted() {
  for_each_interrupted([](Synchronizer& engine) { engine.abandon(); });
}

// ---- between backwards ----------------------------------------------------------------------------------------------

// Makes sure that no backward is under way, and ends the step of one that has failed. The caller's name is for errors.
void Synchronizer::end_backwards(const char* caller) {
  check_outside_backward(caller);
  check_not_forked(kInChild);
  wait_for_backward(caller);
  abandon_interrupted();
}

void Synchronizer::abandon_step() { end_backwards("abandon_step()"); }

void Synchronizer::synchronize() {
  end_backwards("synchronize()");
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto owned = backward_.own();
  begin();
  try {
    step_->mark_all_ready();
    send_rest();
  } catch (...) {
    if (is_under_way_) {  // else it was refused on all ranks
      try {
        abandon();
      } catch (const std::exception&) {  // the first error tells why
      }
    }
    throw;
  }
  end()->receive();
}

// ---- between steps --------------------------------------------------------------------------------------------------

// The ranks agree on a new name. A rank that has run out of batches cannot know the name, unless it begins to join.
void Synchronizer::piggyback(const std::string& name, const at::Tensor& value) {
  TORCH_CHECK_VALUE(!weight_.is_joining() || !have_agreed() || named_.has_slots(name, value), "name: '", name,
                    "' of shape ", value.sizes(), " is new, and ranks that have run out of batches cannot know ",
                    "it: piggyback it on the first sync inside join(), or on an earlier one, on every rank");
  if (!named_.has_slots(name, value)) {
    agree_anew(c10::str("piggybacked value '", name, "' is new"));
  }
  named_.put(name, value.detach().clone(at::MemoryFormat::Contiguous));
}

void Synchronizer::set_weight(double weight) {
  const int64_t step = this->step();
  const bool is_again = std::exchange(weighted_step_, step) == step;
  for (const Parameter& parameter : parameters_) {
    if (parameter.has_left_over() || (!overlaps_ && is_again && parameter.has_own_gradient(/*has_hook=*/false))) {
      refuse_late_weight(parameter.name);
    }
  }
  if (!weight_.is_set()) {
    begin_weights();
  }
  weight_.set(weight);
}

void Synchronizer::set_joining(bool is_joining, std::string states) {
  states_ = std::move(states);
  agree_anew(is_joining ? "join() began" : "join() ended");
  liveness_->set_joining(is_joining);
  weight_.set_joining(is_joining);
  agreement_->step_check.say_nothing();
}

void Synchronizer::make_revocable() {
  EngineState::make_revocable();
  agree_anew("fastsync.Elastic takes its steps");
  set_signal(0.0F);
}

int64_t Synchronizer::set_signal(float signal) {
  signal_.set(signal);
  return step();
}

bool Synchronizer::gradients_are_unchanged() {
  if (!layout_.is_made()) {
    return false;  // no step has left any
  }
  for (size_t index = 0; index < parameters_.size(); ++index) {
    const Parameter& parameter = parameters_[index];
    const at::Tensor tensor(parameter.id.lock());
    const bool counts = layout_.bucket_of(index) != Layout::kNone || (tensor.defined() && takes_part(tensor));
    if (tensor.defined() && counts && !parameter.averaged.is_still(tensor.grad())) {
      return false;
    }
  }
  return true;
}

std::vector<at::Tensor> Synchronizer::with_own_gradients() {
  std::vector<at::Tensor> found;
  for (const Parameter& parameter : parameters_) {
    if (parameter.has_own_gradient(overlaps_)) {
      found.push_back(parameter.lock());
    }
  }
  return found;
}

void Synchronizer::set_optimizer(std::string description) {
  optimizer_ = std::move(description);
  agree_anew("shard_optimizer was called");
}

void Synchronizer::set_shards(std::shared_ptr<ShardGroup> shards) {
  shards_.set_group(std::move(shards));
  for (Parameter& parameter : parameters_) {
    parameter.is_sparse = false;  // so that a sparse gradient is refused
  }
}

// The last tag of the last bucket is free: a plan that keeps shards without shared memory has at most two phases.
void Synchronizer::set_shards_apart() {
  constexpr int64_t kLeastNumbers = 16;  // ranks tell each other 10 before a step
  const int tag = first_tag(agreement_->number) + kMaxBuckets * kTagsPerBucket - 1;
  const auto most_buckets = std::min<int64_t>(kMaxBuckets, static_cast<int64_t>(parameters_.size()));
  const int64_t num_numbers = std::max(kLeastNumbers, kNumStats * most_buckets);
  set_shards(std::make_shared<ShardGroupByMessages>(group_, device_to_agree_on(), num_numbers, tag));
}

std::vector<int64_t> Synchronizer::num_writes() {
  std::vector<int64_t> all;
  for (const Parameter& parameter : parameters_) {
    all.push_back(parameter.averaged.num_writes(parameter.lock().grad()));
  }
  return all;
}

void Synchronizer::put_sums_back(bool only_lone_ones) {
  for (Parameter& parameter : parameters_) {
    if (!only_lone_ones || !parameter.lock().grad().defined()) {
      parameter.put_sum_back();
    }
  }
}

void Synchronizer::take_over(Synchronizer& other) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].take_over(other.parameters_[i]);
  }
}

// ---- one step -------------------------------------------------------------------------------------------------------

void Synchronizer::begin() {
  shards_.check_not_captured();
  std::vector<Gradient> gradients;
  gradients.reserve(parameters_.size());
  for (Parameter& parameter : parameters_) {
    gradients.emplace_back(parameter);
  }
  forget_layout_if_changed(gradients);
  step_ = std::make_unique<Step>(*this, std::move(gradients));
  is_under_way_ = true;
}

void Synchronizer::send_rest() {
  step_->send_weight();
  if (!step_->has_sent_all()) {  // else there is nothing left to agree on
    agree_and_lay_out();
  }
  pass_agreement(*agreement_, step_->number());
  step_->send_rest();
}

void Synchronizer::fail_and_send_rest() {
  step_->fail();
  send_rest();
  step_->leave_behind();
}

void Synchronizer::abandon() {
  try {
    fail_and_send_rest();
  } catch (...) {
    if (is_under_way_) {  // else it was refused on all ranks, and is over
      end();
      liveness_->note_rest();
    }
    throw;
  }
  end()->receive();
}

// Other threads no longer take the step for one that is under way, and wait for the lock.
std::unique_ptr<Step> Synchronizer::end() {
  is_under_way_ = false;
  return std::move(step_);
}

// ---- the layout, and the agreement on it ----------------------------------------------------------------------------

// If a step is refused, it is refused on every rank: no rank is left waiting, and the step is over. It looks at buffers
// only now, because a forward may have changed them, even a forward that a checkpoint repeats during backward.
void Synchronizer::agree_and_lay_out() {
  if (buffers_.have_changed()) {
    agree_anew("a buffer that is synced is of another shape or dtype");
  }
  try {
    if (!layout_.is_made()) {
      lay_out();
    } else if (!have_agreed()) {
      agree(/*init_sync=*/false);
    }
  } catch (const c10::ValueError&) {
    end();
    liveness_->note_rest();
    throw;
  }
}

void Synchronizer::lay_out() {
  const std::vector<Gradient>& gradients = step_->gradients();
  const std::vector<size_t> order = step_->order();
  if (order.empty()) {
    return;  // no parameter requires a gradient, so this step sends nothing
  }
  agree(/*init_sync=*/false);  // first, so that all ranks refuse what one of them cannot send
  std::vector<at::Tensor> tensors;
  for (const Gradient& gradient : gradients) {
    const at::Tensor& tensor = gradient.tensor();
    const at::ScalarType dtype = grad_dtype_of(tensor);
    const CompressionTable& compressions = *compressions_;
    TORCH_CHECK_VALUE(!takes_part(tensor) || (is_supported(real_dtype_of(tensor)) &&
                                              (compressions.is_lossless() || !c10::isComplexType(dtype))),
                      "fastsync: the gradients of parameter ", gradient.parameter().name, " are ", dtype,
                      ", which cannot be synchronised with ", compressions.description);
    tensors.push_back(tensor);
  }
  std::vector<size_t> agreed_order;
  wait_for_ranks("agreement on the order of gradients",
                 [&] { agreed_order = order_of_rank_0(*group_, order, device_to_agree_on()); });
  // Sparse gradients come last, each in a bucket of its own: they are sent at the end of backward, see may_go_early.
  const auto sparse =
      std::ranges::stable_partition(agreed_order, [this](size_t index) { return !parameters_[index].is_sparse; });
  auto buckets = assign_buckets(tensors, {agreed_order.begin(), sparse.begin()}, bucket_cap_bytes_);
  for (const size_t index : sparse) {
    buckets.push_back({index});
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(buckets.size()) <= kMaxBuckets, "fastsync: gradients in ", buckets.size(),
                    " buckets, but there may be ", kMaxBuckets, " at most: use a larger bucket_cap_mb");
  Layout layout(tensors, std::move(buckets));
  for (size_t i = 0; i < layout.buckets.size(); ++i) {
    LayoutBucket& each = layout.buckets[i];
    std::vector<ParameterId> ids;
    for (const size_t index : each.parameters) {
      ids.push_back(parameters_[index].id);
    }
    each.bucket = buckets_.add(std::move(ids), agreement_, "bucket " + std::to_string(i),
                               tensors[each.parameters.front()].device());
    each.bucket->set_mean_factor(sums() ? static_cast<double>(group_->getSize()) : 1.0);
    if (num_micro_batches_ > 0) {
      each.bucket->set_micro_batches(num_micro_batches_);
    }
  }
  flags_.lay_out(layout.num_flags(), group_->getSize());
  buckets_.set_newest_to_all();
  layout_ = std::move(layout);
}

void Synchronizer::forget_layout_if_changed(const std::vector<Gradient>& gradients) {
  if (!layout_.is_made()) {
    return;
  }
  std::string change;
  for (size_t index = 0; index < gradients.size() && change.empty(); ++index) {
    change = layout_.change(index, gradients[index].tensor(), gradients[index].parameter().name);
  }
  if (!change.empty()) {
    buckets_.save_and_forget();
    layout_ = Layout();
    agree_anew(std::move(change));
  }
}

// It must not depend on which gradient got ready first, because the order in which a CPU's and a GPU's parameters get
// ready differs from rank to rank, and each device may have a backend of its own.
c10::Device Synchronizer::device_to_agree_on() const { return parameters_.back().lock().device(); }

void Synchronizer::agree(bool init_sync) {
  Agreement& agreement = *agreement_;
  std::ostringstream text;
  text << (agreement.number < 0 ? "a new engine" : c10::str("engine ", agreement.number)) << "\ninit_sync "
       << (init_sync ? "True" : "False") << "\nbucket_cap_mb " << static_cast<double>(bucket_cap_bytes_) / (1 << 20)
       << (is_revocable() ? "\nfastsync.Elastic True" : "") << "\nop " << word_for(op_)
       << (weight_.is_on() ? ", weighted\n" : "\n")
       << (num_micro_batches_ > 0 ? c10::str("micro_batches ", num_micro_batches_, "\n") : "")
       << side_values_.description() << optimizer_ << states_;
  for (const Parameter& parameter : parameters_) {
    text << parameter.description(parameter.lock());
  }
  text << side_values_.news();
  const int64_t step = step_ ? step_->number() : this->step();
  EngineState::agree(agreement, "agreement", compressions_, step, text.str(), device_to_agree_on());
  side_values_.note_agreed();
  if (!step_) {
    liveness_->note_rest();
  }
}

}  // namespace fastsync
