// Autograd's hooks on parameters: a call when a gradient has been accumulated.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace fastsync {

// Not thread-safe. The parameters live as long as the hooks are on.
class GradientHooks {
 public:
  // Before a gradient is accumulated, in which the owner has to call renew; and after, told whether there was one. Both
  // get the parameter's index.
  struct Calls {
    std::function<void(size_t)> before;
    std::function<void(size_t, bool)> after;
  };

  // Of frozen parameters, too, which may be unfrozen later.
  void put_on(const std::vector<at::Tensor>& parameters, const Calls& calls);
  void renew(size_t index);
  void take_off();

  bool are_on() const { return !parameters_.empty(); }
  const at::Tensor& parameter(size_t index) const { return parameters_[index]; }

 private:
  std::vector<at::Tensor> parameters_;
  std::function<void(size_t, bool)> after_;
};

}  // namespace fastsync
