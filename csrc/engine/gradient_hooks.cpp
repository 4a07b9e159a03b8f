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
  using Hook::Hook;
  variable_list operator()(const variable_list& grads) override {
    call(index);
    return grads;
  }
};

// Runs after a parameter's gradient was accumulated.
struct AfterGradient : Hook<torch::autograd::FunctionPostHook, std::function<void(size_t, bool)>> {
  using Hook::Hook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call(index, inputs.front().defined());
    return outputs;
  }
};

// Ours is a BeforeGradient or an AfterGradient.
template <class Ours>
auto is_of(const GradientHooks* owner) {
  return [owner](const auto& hook) {
    const auto* ours = dynamic_cast<const Ours*>(hook.get());
    return ours != nullptr && ours->owner == owner;
  };
}

}  // namespace

void GradientHooks::put_on(const std::vector<at::Tensor>& parameters, const Calls& calls) {
  parameters_ = parameters;
  after_ = calls.after;
  for (size_t index = 0; index < parameters.size(); ++index) {
    at::Tensor parameter = parameters[index];
    const bool is_frozen = !parameter.requires_grad();
    if (is_frozen) {
      parameter.set_requires_grad(true);  // only then does it take hooks, which it keeps
    }
    torch::autograd::impl::hooks(parameter).push_back(std::make_unique<BeforeGradient>(this, index, calls.before));
    if (is_frozen) {
      parameter.set_requires_grad(false);
    }
  }
}

// The accumulator is not ours to keep alive: it remembers the stream that was current when it was made, and one that
// outlives its graph would take its gradient there for good. A parameter gets a new one with the next forward, and
// also where it is moved or cast.
void GradientHooks::renew(size_t index) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters_[index]);
  if (!accumulator) {
    return;  // the hook runs for torch.autograd.grad, too
  }
  const auto& hooks = accumulator->post_hooks();
  if (std::none_of(hooks.begin(), hooks.end(), is_of<AfterGradient>(this))) {
    accumulator->add_post_hook(std::make_unique<AfterGradient>(this, index, after_));
  }
}

void GradientHooks::take_off() {
  for (const at::Tensor& parameter : parameters_) {
    std::erase_if(torch::autograd::impl::hooks(parameter), is_of<BeforeGradient>(this));
    if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter)) {
      std::erase_if(accumulator->post_hooks(), is_of<AfterGradient>(this));
    }
  }
  parameters_.clear();
}

}  // namespace fastsync
