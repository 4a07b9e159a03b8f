#include "engine/gradient_hook.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "engine/parameter.h"

namespace fastsync {

using torch::autograd::variable_list;

// The base of our hooks. Interface is one of autograd's three.
template <class Interface>
struct GradientHook::Hook : Interface {
  explicit Hook(std::weak_ptr<GradientHook> owner) : owner(std::move(owner)) {}

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    const auto self = owner.lock();
    TORCH_CHECK(self && !self->must_run_,
                "fastsync.attach: compiled autograd does not run the hooks that send gradients; use "
                "attach(overlap=False) and call synchronize() after backward()");
  }

  std::weak_ptr<GradientHook> owner;
};

struct GradientHook::PreHook : Hook<torch::autograd::FunctionPreHook> {
  using Hook::Hook;
  PreHook(const PreHook&) = delete;
  PreHook& operator=(const PreHook&) = delete;
  ~PreHook() override {
    if (const auto self = owner.lock()) {
      self->on_pre_hook_destroyed();
    }
  }
  variable_list operator()(const variable_list& grads) override {
    if (const auto self = owner.lock()) {
      self->before();
    }
    return grads;
  }
};

struct GradientHook::PostHook : Hook<torch::autograd::FunctionPostHook> {
  using Hook::Hook;
  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    // A hook that is put on while its accumulator runs gets no inputs. Then the post-accumulate hook has made the call.
    if (const auto self = owner.lock(); self && !inputs.empty()) {
      self->after(inputs.front().defined());
    }
    return outputs;
  }
};

namespace {

// Returns a function that tells whether a hook is of this type and belongs to this owner.
template <class Ours>
auto belongs_to(const std::weak_ptr<GradientHook>& owner) {
  return [owner](const auto& hook) {
    const auto* const ours = dynamic_cast<const Ours*>(hook.get());
    return ours != nullptr && !ours->owner.owner_before(owner) && !owner.owner_before(ours->owner);
  };
}

// Whether the accumulator will run. It will not if torch.autograd.grad takes the gradient.
bool will_run(torch::autograd::Node& accumulator) {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) {
    return true;  // all nodes of the graph run
  }
  const auto found = chosen->find(&accumulator);
  return found != chosen->end() && found->second.needed_;
}

}  // namespace

// It runs before the accumulator's post-hooks. If our PostHook is one of them, that makes the call.
struct GradientHook::PostAccumulateHook : Hook<torch::autograd::PostAccumulateGradHook> {
  using Hook::Hook;
  void operator()(const torch::autograd::Variable& parameter) override {
    const auto self = owner.lock();
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (self && accumulator && std::ranges::none_of(accumulator->post_hooks(), belongs_to<PostHook>(owner))) {
      self->after(/*was_given=*/true);
    }
  }
};

std::shared_ptr<GradientHook> GradientHook::put_on(const at::Tensor& parameter, size_t index,
                                                   std::weak_ptr<GradientListener> listener, bool must_run) {
  const std::shared_ptr<GradientHook> self(new GradientHook(parameter, index, std::move(listener), must_run));
  const bool is_frozen = !parameter.requires_grad();
  if (is_frozen) {
    parameter.set_requires_grad(true);  // because only then does it take hooks; it keeps them afterwards
  }
  self->put_pre_hook();
  if (is_frozen) {
    parameter.set_requires_grad(false);
  }
  return self;
}

GradientHook::~GradientHook() {
  std::erase_if(torch::autograd::impl::hooks(parameter_), belongs_to<PreHook>(weak_from_this()));
  if (const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter_)) {
    std::erase_if(accumulator->post_hooks(), belongs_to<PostHook>(weak_from_this()));
  }
  if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_);
      belongs_to<PostAccumulateHook>(weak_from_this())(hook)) {
    hook.reset();
  }
}

void GradientHook::put_pre_hook() {
  torch::autograd::impl::hooks(parameter_).push_back(std::make_unique<PreHook>(weak_from_this()));
}

void GradientHook::put_post_hook(torch::autograd::Node& accumulator) {
  if (std::ranges::none_of(accumulator.post_hooks(), belongs_to<PostHook>(weak_from_this()))) {
    accumulator.add_post_hook(std::make_unique<PostHook>(weak_from_this()));
  }
}

void GradientHook::before() {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter_);
  if (!accumulator) {
    return;  // torch.autograd.grad has run the hook
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    put_post_hook(*accumulator);
  }
  if (const auto listener = listener_.lock(); listener && will_run(*accumulator)) {
    listener->before_gradient(index_);
  }
}

void GradientHook::after(bool was_given) {
  Accumulator released;
  if (state_ == State::kOnAccumulator) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_ == State::kOnAccumulator) {
      put_pre_hook();
      state_ = State::kOnParameter;
      std::swap(released, accumulator_);
    }
  }
  if (const auto listener = listener_.lock()) {
    listener->after_gradient(index_, parameter_, was_given && !grad_of(parameter_).defined());
  }
}

void GradientHook::on_pre_hook_destroyed() {
  Accumulator released;
  const std::lock_guard<std::mutex> lock(mutex_);
  state_ = State::kOnAccumulator;
  std::swap(released, accumulator_);
  accumulator_ = torch::autograd::impl::grad_accumulator(parameter_);
  if (accumulator_) {
    put_post_hook(*accumulator_);
  }
  if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter_); !hook) {
    hook = std::make_unique<PostAccumulateHook>(weak_from_this());
  }
}

}  // namespace fastsync
