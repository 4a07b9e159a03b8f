// The state of torch's random numbers on the CPU. torch.get_rng_state() takes as long as a small step's sync.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <optional>

namespace fastsync {

class RandomState {
 public:
  void keep();
  // Makes the state what it was. Does nothing before the first keep().
  void put_back() const;

 private:
  struct Kept {
    at::mt19937 engine;
    std::optional<float> next_float_normal;
    std::optional<double> next_double_normal;
  };

  std::optional<Kept> kept_;
};

}  // namespace fastsync
