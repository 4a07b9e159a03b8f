// A GradientHook tells an engine before and after the gradient of one parameter is accumulated, by hooks of Autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace fastsync {

// Note [Hooks on a parameter]
//   A node of the graph, the accumulator, adds a parameter's gradient to .grad. Hooks on the parameter run before it,
//   hooks on the accumulator run after it. Graphs own the accumulator. A parameter gets a new one with the next
//   forward, and also when it is moved or cast. Nobody else may keep it alive: it remembers the stream that was current
//   when it was made, and would add all later gradients there.
//
//   So the pre-hook is on the parameter, and puts a post-hook on each accumulator that is about to run.
//
//   PyTorch destroys the pre-hook when the first Python hook is registered on the parameter. Inside the pre-hook's
//   destructor no other one can be put on. Until the next gradient has come, two other hooks do its work. One is a
//   post-hook on the accumulator that the parameter has then, which is kept alive until it has run. The other is the
//   parameter's post-accumulate hook, unless the user has one. It runs with any accumulator, even with one that the
//   parameter gets later. After that gradient the pre-hook is put on again.

// An engine that gradient hooks tell. The index is the parameter's.
class GradientListener {
 public:
  virtual ~GradientListener() = default;
  // A gradient is about to be accumulated.
  virtual void before_gradient(size_t /*index*/) {}
  // It has been accumulated. is_gone tells whether .grad is undefined again by then.
  virtual void after_gradient(size_t /*index*/, const at::Tensor& /*parameter*/, bool /*is_gone*/) {}
};

// The hooks are on the parameter from put_on until this object is destroyed. The parameter lives as long. Thread-safe.
class GradientHook : public std::enable_shared_from_this<GradientHook> {
 public:
  // A frozen parameter gets the hooks too, because it may be unfrozen later. With must_run they refuse compiled
  // autograd, which would call none of them.
  static std::shared_ptr<GradientHook> put_on(const at::Tensor& parameter, size_t index,
                                              std::weak_ptr<GradientListener> listener, bool must_run);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

 private:
  enum class State {
    kOnParameter,    // the pre-hook is on the parameter
    kOnAccumulator,  // PyTorch has destroyed the pre-hook, and no gradient has come since then
  };

  // A std::shared_ptr or a pointer of c10, depending on torch's version.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  template <class Interface>
  struct Hook;
  struct PreHook;
  struct PostHook;
  struct PostAccumulateHook;

  GradientHook(const at::Tensor& parameter, size_t index, std::weak_ptr<GradientListener> listener, bool must_run)
      : parameter_(parameter), index_(index), listener_(std::move(listener)), must_run_(must_run) {}

  void before();
  void after(bool was_given);
  void on_pre_hook_destroyed();
  void put_pre_hook();
  void put_post_hook(torch::autograd::Node& accumulator);

  const at::Tensor parameter_;
  const size_t index_;
  const std::weak_ptr<GradientListener> listener_;
  const bool must_run_;

  // No thread holds it while it destroys an accumulator. That may destroy Python hooks, which waits for the GIL.
  // Meanwhile a thread that holds the GIL may register a hook, and wait for this mutex.
  std::mutex mutex_;
  std::atomic<State> state_ = State::kOnParameter;  // changes only under the mutex
  Accumulator accumulator_;                         // null in kOnParameter
};

}  // namespace fastsync
