#include "engine/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace fastsync {

using torch::autograd::variable_list;

// Base is one of autograd's interfaces.
template <class Base>
struct GradientHooks::Hook : Base {
  Hook(std::weak_ptr<GradientHooks> owner, size_t index) : owner(std::move(owner)), index(index) {}

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    const auto hooks = owner.lock();
    TORCH_CHECK(
        hooks && !hooks->options_.must_run,
        "fastsync.attach: compiled autograd does not run the hooks that send gradients; use attach(overlap=False) "
        "and call synchronize() after backward()");
  }

  std::weak_ptr<GradientHooks> owner;
  size_t index;
};

namespace {

// Ours is one of these.
template <class Ours>
auto is_of(const GradientHooks* owner) {
  return [owner](const auto& hook) {
    const auto* ours = dynamic_cast<const Ours*>(hook.get());
    return ours != nullptr && ours->owner.lock().get() == owner;
  };
}

// Not where torch.autograd.grad takes what would be accumulated.
bool will_run(torch::autograd::Node& accumulator) {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) {
    return true;  // all of the graph
  }
  const auto found = chosen->find(&accumulator);
  return found != chosen->end() && found->second.needed_;
}

}  // namespace

struct GradientHooks::Before : Hook<torch::autograd::FunctionPreHook> {
  using Hook::Hook;
  Before(const Before&) = delete;
  Before& operator=(const Before&) = delete;
  ~Before() override {
    if (const auto hooks = owner.lock()) {
      hooks->lose(index);
    }
  }
  variable_list operator()(const variable_list& grads) override {
    if (const auto hooks = owner.lock()) {
      hooks->before(index);
    }
    return grads;
  }
};

struct GradientHooks::After : Hook<torch::autograd::FunctionPostHook> {
  using Hook::Hook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    if (const auto hooks = owner.lock()) {
      hooks->after(index, inputs.front().defined());
    }
    return outputs;
  }
};

struct GradientHooks::With : Hook<torch::autograd::PostAccumulateGradHook> {
  using Hook::Hook;
  void operator()(const torch::autograd::Variable& parameter) override {
    const auto hooks = owner.lock();
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (hooks && accumulator && std::ranges::none_of(accumulator->post_hooks(), is_of<After>(hooks.get()))) {
      hooks->after(index, /*was_given=*/true);
    }
  }
};

void GradientHooks::put_on(const std::vector<at::Tensor>& parameters, Call call, Options options) {
  const std::lock_guard<std::mutex> lock(mutex_);
  parameters_ = parameters;
  call_ = std::move(call);
  options_ = std::move(options);
  for (size_t index = 0; index < parameters.size(); ++index) {
    at::Tensor parameter = parameters[index];
    const bool is_frozen = !parameter.requires_grad();
    if (is_frozen) {
      parameter.set_requires_grad(true);  // only then does it take hooks, which it keeps
    }
    put_on_before(index);
    if (is_frozen) {
      parameter.set_requires_grad(false);
    }
  }
}

void GradientHooks::put_on_before(size_t index) {
  torch::autograd::impl::hooks(parameters_[index]).push_back(std::make_unique<Before>(weak_from_this(), index));
}

void GradientHooks::put_on_after(torch::autograd::Node& accumulator, size_t index) {
  if (std::ranges::none_of(accumulator.post_hooks(), is_of<After>(this))) {
    accumulator.add_post_hook(std::make_unique<After>(weak_from_this(), index));
  }
}

// The accumulator is not ours to keep alive: it remembers the stream that was current when it was made, and one that
// outlives its graph would take its gradient there for good. A parameter gets a new one with the next forward, and
// also where it is moved or cast.
void GradientHooks::before(size_t index) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index >= parameters_.size()) {
      return;  // another thread has taken them off
    }
    // Without one it is torch.autograd.grad that the hook runs for.
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters_[index]);
    if (!accumulator) {
      return;
    }
    put_on_after(*accumulator, index);
    if (!options_.before || !will_run(*accumulator)) {
      return;
    }
  }
  options_.before(index);
}

void GradientHooks::after(size_t index, bool was_given) {
  bool is_gone = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index >= parameters_.size()) {
      return;
    }
    is_gone = was_given && !parameters_[index].grad().defined();
    if (accumulators_.erase(index) > 0) {
      put_on_before(index);
    }
  }
  call_(index, is_gone);
}

// PyTorch destroys a parameter's hooks of C++ when its first one of Python, by register_hook, is put on, which nothing
// here may wait for. Until the next gradient has come this keeps what runs after it, and then puts the others on again.
void GradientHooks::lose(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= parameters_.size()) {
    return;  // they have been taken off
  }
  if (auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index])) {
    put_on_after(*accumulator, index);
    accumulators_[index] = std::move(accumulator);
  }
  // One that is moved or cast before its next gradient gets another accumulator.
  if (auto& free = torch::autograd::impl::post_acc_grad_hooks(parameters_[index]); !free) {
    free = std::make_unique<With>(weak_from_this(), index);
  }
}

void GradientHooks::take_off() {
  std::vector<at::Tensor> parameters;
  decltype(accumulators_) accumulators;  // they may take hooks of Python's with them, which wait for the GIL
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parameters.swap(parameters_);
    accumulators.swap(accumulators_);
  }
  for (const at::Tensor& parameter : parameters) {
    std::erase_if(torch::autograd::impl::hooks(parameter), is_of<Before>(this));
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter)) {
      std::erase_if(accumulator->post_hooks(), is_of<After>(this));
    }
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter); is_of<With>(this)(hook)) {
      hook.reset();
    }
  }
}

}  // namespace fastsync
