// What a step changes beside parameters, gradients and the engine, as it was before the step.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace fastsync {

// Keeps buffers, and the state of torch's random numbers on the CPU. It uses the same memory again in each step.
class BeforeStep {
 public:
  void keep(std::vector<at::Tensor> buffers);
  // Makes the kept buffers, and the random state, what they were. Does nothing before the first keep().
  void put_back();

 private:
  struct RandomState {
    at::mt19937 engine;
    std::optional<float> next_float_normal;
    std::optional<double> next_double_normal;
  };

  std::vector<at::Tensor> buffers_;
  std::vector<at::Tensor> copies_;
  std::optional<RandomState> random_;
};

}  // namespace fastsync
