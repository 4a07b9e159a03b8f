// The buffers of a model travel with each sync, on all ranks or on none.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>

namespace fastsync {

class ModelBuffers {
 public:
  // `describe` returns lines that the ranks have to agree on. `values` returns float32 values, which are added up over
  // the ranks. is_first tells whether this rank is the first of those that have gradients. It is a bool tensor, on the
  // device where the values must be. `arrive` gets the sums, which are nan if a rank has failed.
  struct Calls {
    std::function<std::string()> describe;
    std::function<at::Tensor(const at::Tensor& is_first)> values;
    std::function<void(const at::Tensor& sums)> arrive;
  };

  // Makes an object without calls: no buffers travel.
  ModelBuffers() = default;
  explicit ModelBuffers(Calls calls) : calls_(std::move(calls)), description_(calls_.describe()) {}

  bool are_sent() const { return calls_.values != nullptr; }
  // Lines that the ranks have to agree on, as of the newest look at the buffers.
  const std::string& description() const { return description_; }
  // Looks at the buffers again, and returns whether the description has changed.
  bool have_changed() {
    if (!are_sent()) {
      return false;
    }
    const std::string before = std::exchange(description_, calls_.describe());
    return description_ != before;
  }

  at::Tensor values(const at::Tensor& is_first) const { return calls_.values(is_first); }
  void arrive(const at::Tensor& sums) const { calls_.arrive(sums); }

 private:
  Calls calls_;
  std::string description_ = "broadcast_buffers False\n";
};

}  // namespace fastsync
