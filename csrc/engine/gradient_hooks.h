// Autograd's hooks on parameters: a call when a gradient has been accumulated.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace fastsync {

// Not thread-safe, but for lose. The parameters live as long as the hooks are on.
class GradientHooks {
 public:
  // Before a gradient is accumulated, in which the owner has to call renew; after, told whether there was one, to call
  // restore; and when the one before is destroyed, to call lose. All get the parameter's index.
  struct Calls {
    std::function<void(size_t)> before;
    std::function<void(size_t, bool)> after;
    std::function<void(size_t)> lost;
  };

  // Of frozen parameters, too, which may be unfrozen later.
  void put_on(const std::vector<at::Tensor>& parameters, const Calls& calls);
  void renew(size_t index);
  void take_off();

  // PyTorch destroys a parameter's hooks of C++ when its first one of Python, by register_hook, is put on. Until the
  // next gradient has come this keeps what runs after it, and then puts the others on again.
  void lose(size_t index);
  void restore(size_t index);

  bool are_on() const { return !parameters_.empty(); }
  const at::Tensor& parameter(size_t index) const { return parameters_[index]; }

 private:
  // A shared_ptr or one of c10's, by torch's version.
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  void put_on_after(torch::autograd::Node& accumulator, size_t index);
  void put_on_before(size_t index);

  Calls calls_;
  std::mutex mutex_;  // of what follows, where lose may be called; never held while anything waits
  std::vector<at::Tensor> parameters_;
  std::map<size_t, Accumulator> accumulators_;  // of those that are lost
  std::atomic<bool> has_lost_{false};
};

}  // namespace fastsync
