// The buffers of a model travel with each step, on all ranks or on none.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/passenger.h"

namespace fastsync {

class ModelBuffers final : public Passenger {
 public:
  // `describe` returns lines that the ranks have to agree on. `values` returns float32 values, which are added up over
  // the ranks. is_first tells whether this rank is the first of those that have gradients. It is a bool tensor, on the
  // device where the values must be. `arrive` gets the sums, which are nan if a rank has failed.
  struct Calls {
    std::function<std::string()> describe;
    std::function<at::Tensor(const at::Tensor& is_first)> values;
    std::function<void(const at::Tensor& sums)> arrive;
  };

  // Before the first call no buffers travel.
  void set(Calls calls);
  // Looks at the buffers again, and returns whether the description has changed.
  bool have_changed();

  // Of the newest look at the buffers.
  std::string description() const override { return description_; }
  bool waits_for_end() const override { return calls_.values != nullptr; }
  void add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) override;
  void take(const Sums& sums, const StepInfo& step) override;

 private:
  Calls calls_;
  std::string description_ = "broadcast_buffers False\n";
};

}  // namespace fastsync
