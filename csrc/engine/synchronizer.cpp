#include "engine/synchronizer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <set>
#include <thread>

namespace fastsync {

using torch::autograd::variable_list;

namespace {

// Those whose calls have to come in one order on all ranks have the same. NCCL asks that of all groups together:
// collectives of two groups, begun in different orders on two ranks, may wait for each other on the device.
const void* lane_of(c10::Device device, const c10d::ProcessGroup& group) {
  static const char of_all_groups = 0;
  return device.is_cpu() ? static_cast<const void*>(&group) : &of_all_groups;
}

// All ranks must send in one order. The buckets of one engine have one; those of two engines whose gradients get ready
// side by side do not. So of the engines in one lane only the first to be attached sends while backward goes on, and at
// its end all of them follow each other in the order in which they were attached.
struct Attached {
  struct Entry {
    const Synchronizer* engine;
    const void* lane;
    std::weak_ptr<Synchronizer> owner;
  };

  std::mutex mutex;  // never held while an engine's is taken, nor while an engine may end
  std::vector<Entry> engines;

  std::vector<std::shared_ptr<Synchronizer>> in_order() {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::shared_ptr<Synchronizer>> alive;
    for (const Entry& entry : engines) {
      if (auto owner = entry.owner.lock()) {
        alive.push_back(std::move(owner));
      }
    }
    return alive;
  }
};

Attached& attached() {
  static auto& attached = *new Attached();  // outlives every engine
  return attached;
}

void refuse_to_be_compiled(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) {
  TORCH_CHECK(
      false,
      "fastsync.attach: compiled autograd does not run the hooks that send gradients; use attach(overlap=False) "
      "and call synchronize() after backward()");
}

// Runs before a parameter's gradient is accumulated, whichever accumulator it has by then.
struct BeforeGradient : torch::autograd::FunctionPreHook {
  BeforeGradient(const Synchronizer* engine, std::function<void()> call) : engine(engine), call(std::move(call)) {}
  variable_list operator()(const variable_list& grads) override {
    call();
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { refuse_to_be_compiled(args); }

  const Synchronizer* engine;
  std::function<void()> call;
};

// Runs after a parameter's gradient was accumulated; told whether there was one.
struct AfterGradient : torch::autograd::FunctionPostHook {
  AfterGradient(const Synchronizer* engine, std::function<void(bool)> call) : engine(engine), call(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call(inputs.front().defined());
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { refuse_to_be_compiled(args); }

  const Synchronizer* engine;
  std::function<void(bool)> call;
};

// Ours is a BeforeGradient or an AfterGradient.
template <class Ours, class Hook>
bool is_hook_of(const std::unique_ptr<Hook>& hook, const Synchronizer* engine) {
  const auto* ours = dynamic_cast<const Ours*>(hook.get());
  return ours != nullptr && ours->engine == engine;
}

constexpr int kNoGraphTask = -1;

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != kNoGraphTask; }

}  // namespace

Synchronizer::Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                           c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes)
    : lane_(lane_of(parameters.front().device(), *group)),
      is_on_cpu_(parameters.front().is_cpu()),
      process_id_(getpid()),
      sync_(parameters, std::move(names), std::move(group), bucket_cap_bytes) {}

Synchronizer::~Synchronizer() {
  if (getpid() == process_id_) {  // in a forked child another thread's locks stay locked
    take_hooks_off();
  }
}

// ---- hooks --------------------------------------------------------------------------------------------------------

void Synchronizer::attach(const std::vector<at::Tensor>& parameters) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooked_ = parameters;
    for (size_t index = 0; index < parameters.size(); ++index) {
      at::Tensor parameter = parameters[index];
      const bool is_frozen = !parameter.requires_grad();
      if (is_frozen) {
        parameter.set_requires_grad(true);  // only then does it take hooks, which it keeps
      }
      torch::autograd::impl::hooks(parameter).push_back(
          std::make_unique<BeforeGradient>(this, [self = weak_from_this(), index] {
            if (const auto engine = self.lock()) {
              engine->before_gradient(index);
            }
          }));
      if (is_frozen) {
        parameter.set_requires_grad(false);
      }
    }
  }
  const std::lock_guard<std::mutex> lock(attached().mutex);
  attached().engines.push_back({this, lane_, weak_from_this()});
}

// The accumulator is not ours to keep alive: it remembers the stream that was current when it was made, and one that
// outlives its graph would take its gradient there for good. A parameter gets a new one with the next forward, and
// also where it is moved or cast.
void Synchronizer::before_gradient(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (hooked_.empty()) {
    return;  // detached, by another thread
  }
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(hooked_[index]);
  if (!accumulator) {
    return;  // the hook runs for torch.autograd.grad, too
  }
  const auto& hooks = accumulator->post_hooks();
  const auto is_ours = [&](const auto& hook) { return is_hook_of<AfterGradient>(hook, this); };
  if (std::none_of(hooks.begin(), hooks.end(), is_ours)) {
    accumulator->add_post_hook(std::make_unique<AfterGradient>(this, [self = weak_from_this(), index](bool was_given) {
      if (const auto engine = self.lock()) {
        engine->on_gradient(index, was_given);
      }
    }));
  }
}

void Synchronizer::take_hooks_off() {
  {
    const std::lock_guard<std::mutex> lock(attached().mutex);
    std::erase_if(attached().engines, [&](const auto& entry) { return entry.engine == this; });
  }
  for (const at::Tensor& parameter : hooked_) {
    std::erase_if(torch::autograd::impl::hooks(parameter),
                  [&](const auto& hook) { return is_hook_of<BeforeGradient>(hook, this); });
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter)) {
      std::erase_if(accumulator->post_hooks(), [&](const auto& hook) { return is_hook_of<AfterGradient>(hook, this); });
    }
  }
  hooked_.clear();
}

void Synchronizer::detach() {
  TORCH_CHECK(!inside_backward(), "fastsync: detach() was called inside a backward; call it after");
  if (getpid() == process_id_) {
    wait_for_backward("detach()");
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  take_hooks_off();
}

// One that has failed may still be let go of by the device's thread when its error has arrived here.
void Synchronizer::wait_for_backward(const char* caller) const {
  constexpr std::chrono::seconds kLimit(1);
  constexpr std::chrono::milliseconds kPause(1);
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (sync_.is_under_way() && !is_interrupted()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "fastsync: ", caller,
                " was called while another thread's ", "backward is under way; call it after");
    std::this_thread::sleep_for(kPause);
  }
}

void Synchronizer::set_enabled(bool enabled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_enabled_ = enabled;
}

// ---- backward -----------------------------------------------------------------------------------------------------

void Synchronizer::on_gradient(size_t index, bool was_given) {
  if (is_interrupted()) {
    check_not_forked();
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(!was_given || hooked_.empty() || hooked_[index].grad().defined(), "fastsync: the gradient of ",
                    sync_.name(index), " was gone as soon as backward had made it, before the ranks could average it. ",
                    "Does an optimizer step inside backward (register_post_accumulate_grad_hook, ",
                    "_apply_optimizer_in_backward)? Ranks would drift apart: step after backward");
  const at::NoGradGuard no_grad;
  call_at_the_end_of_backward();  // first, for a sync that nobody owns looks interrupted
  if (is_enabled_ && !sync_.is_under_way()) {
    begin();
  }
  if (!is_enabled_) {
    sync_.mark_new(index);
    return;
  }
  sync_.mark_ready(index);
  if (may_send_early()) {
    sync_.send_full_buckets();
  }
}

void Synchronizer::check_not_forked() const {
  TORCH_CHECK(getpid() == process_id_, "fastsync: this process was forked from the one that attached the engine, and ",
              "the process group did not come along; call detach() in the child");
}

void Synchronizer::begin() {
  check_not_forked();
  if (leftover_error_) {
    std::rethrow_exception(std::exchange(leftover_error_, nullptr));
  }
  sync_.begin();
}

// A graph task's, held by what its engines call at its end. One that fails lets go of those calls without making them,
// when backward raises: then the other ranks get what they wait for, before any other collective of this rank's. Inside
// another backward its end is waited for, for all engines together send in one order.
struct Synchronizer::Backward {
  ~Backward() {
    if (has_ended) {
      return;
    }
    if (inside_backward()) {
      auto outer = of(torch::autograd::get_current_graph_task_id());
      torch::autograd::Engine::get_default_engine().queue_callback([outer = std::move(outer)] {});
      return;
    }
    send_leftovers();
  }

  bool has_ended = false;

  static std::shared_ptr<Backward> of(int graph_task) {
    static std::mutex mutex;
    static auto& of_task = *new std::map<int, std::weak_ptr<Backward>>();
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(of_task, [](const auto& entry) { return entry.second.expired(); });
    auto backward = of_task[graph_task].lock();
    if (!backward) {
      backward = std::make_shared<Backward>();
      of_task[graph_task] = backward;
    }
    return backward;
  }
};

// Once for each graph task: a backward that runs inside another's node, as a reentrant checkpoint does, has its own.
void Synchronizer::call_at_the_end_of_backward() {
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (auto backward = new_owner(graph_task)) {
    // Strong, so that the last owner does not die inside one of its hooks.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this(), graph_task, backward = std::move(backward)] {
          backward->has_ended = true;
          self->on_backward_end(graph_task);
        });
  }
}

// What the sync belongs to from now on, to be held until it ends; null where it belongs to that graph task already.
std::shared_ptr<Synchronizer::Backward> Synchronizer::new_owner(int graph_task) {
  const std::lock_guard<std::mutex> lock(owner_mutex_);
  if (graph_task == graph_task_ && graph_task != kNoGraphTask && !owner_.expired()) {
    return nullptr;
  }
  graph_task_ = graph_task;
  auto backward = graph_task == kNoGraphTask ? std::make_shared<Backward>() : Backward::of(graph_task);
  owner_ = backward;
  return backward;
}

void Synchronizer::on_backward_end(int graph_task) {
  if (ends_with(graph_task) && !outer_backward_will_call()) {
    const at::NoGradGuard no_grad;
    finish(graph_task);
  }
}

// Engines that take part in one backward end together. None waits before all have sent, or ranks on which they come in
// different orders would wait for each other. One that fails keeps neither its own ranks waiting nor those of others.
void Synchronizer::finish(int graph_task) {
  const auto engines = attached().in_order();
  std::exception_ptr error;
  std::set<const Synchronizer*> failed;
  const auto of_each = [&](const auto& call) {
    for (const auto& engine : engines) {
      if (engine->ends_with(graph_task)) {
        const std::lock_guard<std::mutex> lock(engine->mutex_);
        try {
          call(*engine);
        } catch (...) {
          error = error ? error : std::current_exception();
          failed.insert(engine.get());
        }
      }
    }
  };
  of_each([&](Synchronizer& engine) {
    try {
      engine.sync_.send_rest();
    } catch (...) {
      error = error ? error : std::current_exception();
      if (engine.sync_.is_under_way()) {  // else it was refused on all ranks
        engine.sync_.send_poisoned_rest();
      }
      throw;
    }
  });
  of_each([&](Synchronizer& engine) { failed.count(&engine) == 0 ? engine.sync_.receive() : engine.sync_.discard(); });
  if (error) {
    std::rethrow_exception(error);
  }
}

// A backward that raised never calls on_backward_end. Of all engines together, because here too the order counts.
template <class Call>
void Synchronizer::of_each_interrupted(const Call& call) {
  const at::NoGradGuard no_grad;
  for (const auto& engine : attached().in_order()) {
    if (getpid() == engine->process_id_ && engine->is_interrupted()) {
      const std::lock_guard<std::mutex> lock(engine->mutex_);
      if (engine->is_interrupted()) {  // and no other thread was here first
        call(*engine);
      }
    }
  }
}

// The error is on its way to the user. What fails here is thrown when the engine is used next. On a device the graph
// task may end on another thread, when the user's has gone on: there what is left goes with the next backward.
void Synchronizer::send_leftovers() {
  of_each_interrupted([](Synchronizer& engine) {
    if (!engine.is_on_cpu_) {
      return;
    }
    if (engine.sync_.rest_waits()) {
      std::cerr << "fastsync: backward failed, and other ranks have yet to agree with this one on what to send. It "
                   "waits for them, until the process group's time-out, before it raises the error\n";
    }
    try {
      engine.sync_.send_poisoned_rest();
    } catch (...) {
      if (!engine.sync_.is_under_way()) {  // else it is tried again
        engine.leftover_error_ = std::current_exception();
      }
    }
  });
}

void Synchronizer::abandon_interrupted() {
  of_each_interrupted([](Synchronizer& engine) { engine.sync_.abandon(); });
}

bool Synchronizer::is_interrupted() const {
  const std::lock_guard<std::mutex> lock(owner_mutex_);
  return sync_.is_under_way() && owner_.expired();
}

bool Synchronizer::ends_with(int graph_task) const {
  const std::lock_guard<std::mutex> lock(owner_mutex_);
  return sync_.is_under_way() && graph_task_ == graph_task;
}

bool Synchronizer::may_send_early() const {
  const std::lock_guard<std::mutex> lock(attached().mutex);
  const auto& engines = attached().engines;
  const auto first =
      std::find_if(engines.begin(), engines.end(), [&](const auto& entry) { return entry.lane == lane_; });
  return first != engines.end() && first->engine == this;
}

namespace {

// Calls once, before the node it is put on runs.
struct BeforeNode : torch::autograd::FunctionPreHook {
  explicit BeforeNode(std::function<void()> call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto once = std::exchange(call, nullptr)) {
      once();
    }
    return grads;
  }
  std::function<void()> call;
};

void call_before(torch::autograd::Node& node, std::function<void()> call) {
  auto& hooks = node.pre_hooks();
  // A node that outlives its graph must not collect them.
  std::erase_if(hooks, [](const auto& hook) {
    const auto* mine = dynamic_cast<const BeforeNode*>(hook.get());
    return mine != nullptr && !mine->call;
  });
  hooks.push_back(std::make_unique<BeforeNode>(std::move(call)));
}

}  // namespace

// At the end of a backward inside another one's node, more gradients may come from the outer one. It goes on with the
// nodes after this: there its own end can be waited for.
bool Synchronizer::outer_backward_will_call() {
  const auto outer = torch::autograd::get_current_node();
  if (!outer) {
    return false;
  }
  const auto call = [self = weak_from_this()] {
    if (const auto engine = self.lock()) {
      const std::lock_guard<std::mutex> lock(engine->mutex_);
      if (engine->sync_.is_under_way()) {
        engine->call_at_the_end_of_backward();
      }
    }
  };
  bool will_call = false;
  for (const auto& edge : outer->next_edges()) {
    if (edge.function) {
      call_before(*edge.function, call);
      will_call = true;
    }
  }
  if (will_call) {
    // The outer node holds the token, for it lives as long as its graph; a next one may be an accumulator.
    auto token = std::make_shared<char>();
    const std::lock_guard<std::mutex> lock(owner_mutex_);
    owner_ = token;
    call_before(*outer, [token = std::move(token)] {});
  }
  return will_call;
}

// ---- between backwards ----------------------------------------------------------------------------------------------

void Synchronizer::synchronize() {
  TORCH_CHECK(!inside_backward(), "fastsync: synchronize() was called inside a backward; call it after");
  check_not_forked();
  wait_for_backward("synchronize()");
  abandon_interrupted();
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto token = new_owner(kNoGraphTask);
  begin();
  try {
    sync_.mark_all_ready();
    sync_.send_rest();
  } catch (...) {
    if (sync_.is_under_way()) {  // else it was refused on all ranks
      sync_.abandon();
    }
    throw;
  }
  sync_.receive();
}

void Synchronizer::set_schedule(std::shared_ptr<const Schedule> schedule) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.set_schedule(std::move(schedule));
}

int64_t Synchronizer::step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.step();
}

void Synchronizer::set_step(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.set_step(step);
}

std::vector<ParameterResidual> Synchronizer::residuals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.residuals();
}

void Synchronizer::set_residuals(const std::vector<ParameterResidual>& residuals) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.set_residuals(residuals);
}

void Synchronizer::agree() {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.agree();
}

void Synchronizer::ride(const std::string& name, const at::Tensor& value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.ride(name, value);
}

Riders::Tensors Synchronizer::riders() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.riders();
}

at::Tensor Synchronizer::grad_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.grad_stats();
}

SyncTotals Synchronizer::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.totals();
}

int64_t Synchronizer::num_steps() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.num_steps();
}

bool Synchronizer::is_captured() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.is_captured();
}

bool Synchronizer::gradients_are_unchanged() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.gradients_are_unchanged();
}

std::vector<ParameterScale> Synchronizer::scales() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sync_.scales();
}

void Synchronizer::set_scales(const std::vector<ParameterScale>& scales) {
  const std::lock_guard<std::mutex> lock(mutex_);
  sync_.set_scales(scales);
}

}  // namespace fastsync
