#include "engine/gradient_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace fastsync {

using torch::autograd::variable_list;

namespace {

// A hook of autograd's that calls; Base is one of its interfaces.
template <class Base, class Call>
struct Hook : Base {
  Hook(const GradientHooks* owner, size_t index, Call call) : owner(owner), index(index), call(std::move(call)) {}

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK(
        false,
        "fastsync.attach: compiled autograd does not run the hooks that send gradients; use attach(overlap=False) "
        "and call synchronize() after backward()");
  }

  const GradientHooks* owner;
  size_t index;
  Call call;
};

// Runs before a parameter's gradient is accumulated, whichever accumulator it has by then.
struct BeforeGradient : Hook<torch::autograd::FunctionPreHook, std::function<void(size_t)>> {
  BeforeGradient(const GradientHooks* owner, size_t index, const GradientHooks::Calls& calls)
      : Hook(owner, index, calls.before), lost(calls.lost) {}
  BeforeGradient(const BeforeGradient&) = delete;
  BeforeGradient& operator=(const BeforeGradient&) = delete;
  ~BeforeGradient() override { lost(index); }
  variable_list operator()(const variable_list& grads) override {
    call(index);
    return grads;
  }

  std::function<void(size_t)> lost;
};

// Runs after a parameter's gradient was accumulated.
struct AfterGradient : Hook<torch::autograd::FunctionPostHook, std::function<void(size_t, bool)>> {
  using Hook::Hook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call(index, inputs.front().defined());
    return outputs;
  }
};

// Runs with each gradient that an accumulator has taken, whichever that is by then, before the accumulator's own hooks.
struct WithGradient : Hook<torch::autograd::PostAccumulateGradHook, std::function<void(size_t, bool)>> {
  using Hook::Hook;
  void operator()(const torch::autograd::Variable& parameter) override;
};

// Ours is one of these.
template <class Ours>
auto is_of(const GradientHooks* owner) {
  return [owner](const auto& hook) {
    const auto* ours = dynamic_cast<const Ours*>(hook.get());
    return ours != nullptr && ours->owner == owner;
  };
}

bool has_hook_after(torch::autograd::Node& accumulator, const GradientHooks* owner) {
  const auto& hooks = accumulator.post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), is_of<AfterGradient>(owner));
}

void WithGradient::operator()(const torch::autograd::Variable& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator && !has_hook_after(*accumulator, owner)) {
    call(index, true);
  }
}

}  // namespace

void GradientHooks::put_on(const std::vector<at::Tensor>& parameters, const Calls& calls) {
  const std::lock_guard<std::mutex> lock(mutex_);
  parameters_ = parameters;
  calls_ = calls;
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
  torch::autograd::impl::hooks(parameters_[index]).push_back(std::make_unique<BeforeGradient>(this, index, calls_));
}

// The accumulator is not ours to keep alive: it remembers the stream that was current when it was made, and one that
// outlives its graph would take its gradient there for good. A parameter gets a new one with the next forward, and
// also where it is moved or cast.
void GradientHooks::renew(size_t index) {
  // Without one it is torch.autograd.grad that the hook runs for.
  if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters_[index])) {
    put_on_after(*accumulator, index);
  }
}

void GradientHooks::put_on_after(torch::autograd::Node& accumulator, size_t index) {
  if (!has_hook_after(accumulator, this)) {
    accumulator.add_post_hook(std::make_unique<AfterGradient>(this, index, calls_.after));
  }
}

void GradientHooks::lose(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (index >= parameters_.size()) {
    return;  // they have been taken off
  }
  if (auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index])) {
    put_on_after(*accumulator, index);
    accumulators_[index] = std::move(accumulator);
    has_lost_ = true;
  }
  // One that is moved or cast before its next gradient gets another accumulator.
  if (auto& free = torch::autograd::impl::post_acc_grad_hooks(parameters_[index]); !free) {
    free = std::make_unique<WithGradient>(this, index, calls_.after);
  }
}

void GradientHooks::restore(size_t index) {
  if (!has_lost_) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (accumulators_.erase(index) > 0) {
    put_on_before(index);
    has_lost_ = !accumulators_.empty();
  }
}

void GradientHooks::take_off() {
  std::vector<at::Tensor> parameters;
  decltype(accumulators_) accumulators;  // they may take hooks of Python's with them, which wait for the GIL
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    parameters = std::exchange(parameters_, {});
    accumulators = std::exchange(accumulators_, {});
    has_lost_ = false;
  }
  for (const at::Tensor& parameter : parameters) {
    std::erase_if(torch::autograd::impl::hooks(parameter), is_of<BeforeGradient>(this));
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter)) {
      std::erase_if(accumulator->post_hooks(), is_of<AfterGradient>(this));
    }
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter); is_of<WithGradient>(this)(hook)) {
      hook.reset();
    }
  }
}

}  // namespace fastsync
