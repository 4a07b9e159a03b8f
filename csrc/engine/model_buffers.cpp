#include "engine/model_buffers.h"

#include <ATen/ATen.h>

#include <limits>
#include <utility>

namespace fastsync {

void ModelBuffers::set(Calls calls) {
  calls_ = std::move(calls);
  description_ = calls_.describe();
}

bool ModelBuffers::have_changed() {
  if (!calls_.describe) {
    return false;
  }
  const std::string before = std::exchange(description_, calls_.describe());
  return description_ != before;
}

void ModelBuffers::add_tensors(std::vector<at::Tensor>& tensors, const Journey& journey) {
  if (!calls_.values) {
    return;
  }
  const auto is_bool = at::TensorOptions().dtype(at::kBool).device(journey.device);
  const at::Tensor is_first = journey.active.defined() ? (journey.active.argmax() == journey.rank).to(journey.device)
                                                       : at::full({}, journey.rank == 0, is_bool);
  const at::Tensor values = calls_.values(is_first);
  if (journey.has_failed) {
    tensors.push_back(at::full_like(values, std::numeric_limits<double>::quiet_NaN()));
  } else {
    tensors.push_back(journey.is_active ? values : at::zeros_like(values));
  }
}

void ModelBuffers::take(const Sums& sums, const Journey& journey) {
  if (calls_.arrive && !journey.has_failed) {
    calls_.arrive(sums.tensor());
  }
}

}  // namespace fastsync
