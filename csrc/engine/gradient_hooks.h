// Autograd's hooks on parameters: a call when a gradient has been accumulated.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fastsync {

// Must be owned by a shared_ptr. Thread-safe. The parameters live as long as the hooks are on.
class GradientHooks : public std::enable_shared_from_this<GradientHooks> {
 public:
  // Gets the parameter's index, and whether the gradient that was accumulated is gone already.
  using Call = std::function<void(size_t index, bool is_gone)>;

  // What is called, besides: before a gradient is accumulated. And whether compiled autograd, which calls nothing, is
  // refused.
  struct Options {
    std::function<void(size_t index)> before;
    bool must_run = true;
  };

  // Once. Of frozen parameters, too, which may be unfrozen later.
  void put_on(const std::vector<at::Tensor>& parameters, Call call, Options options);
  void take_off();

 private:
  // A shared_ptr or one of c10's, by torch's version.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  template <class Base>
  struct Hook;
  struct Before;  // runs before a gradient is accumulated, whichever accumulator the parameter has by then
  struct After;   // runs when the accumulator that it is on has done so
  struct With;    // runs with each gradient that any has accumulated, before the accumulator's own hooks

  void before(size_t index);
  void after(size_t index, bool was_given);
  void lose(size_t index);
  void put_on_before(size_t index);
  void put_on_after(torch::autograd::Node& accumulator, size_t index);

  Call call_;
  Options options_;
  std::mutex mutex_;  // of what follows; never held while anything waits
  std::vector<at::Tensor> parameters_;
  std::map<size_t, Accumulator> accumulators_;  // of parameters that have lost their hook
};

}  // namespace fastsync
