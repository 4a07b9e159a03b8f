// A model's buffers that travel with each sync, of all ranks' models or of none's.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>

namespace fastsync {

class ModelBuffers {
 public:
  // values: float32, to be added up over the ranks. What they are follows from whether this rank is the first of those
  // that have gradients: a bool, on the device that they have to be on. arrive gets their sums, nan if a rank has
  // failed.
  struct Calls {
    std::function<std::string()> describe;
    std::function<at::Tensor(const at::Tensor& is_first)> values;
    std::function<void(const at::Tensor& sums)> arrive;
  };

  // No buffers travel.
  ModelBuffers() = default;
  explicit ModelBuffers(Calls calls) : calls_(std::move(calls)), description_(calls_.describe()) {}

  bool are_sent() const { return calls_.values != nullptr; }
  // Lines that the ranks have to agree on, as of the newest look at the buffers.
  const std::string& description() const { return description_; }
  // Looks at them again, and returns whether the description is another one.
  bool have_changed() {
    const std::string before = are_sent() ? std::exchange(description_, calls_.describe()) : description_;
    return description_ != before;
  }

  at::Tensor values(const at::Tensor& is_first) const { return calls_.values(is_first); }
  void arrive(const at::Tensor& sums) const { calls_.arrive(sums); }

 private:
  Calls calls_;
  std::string description_ = "broadcast_buffers False\n";
};

}  // namespace fastsync
