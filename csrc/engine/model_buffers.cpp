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

void ModelBuffers::add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) {
  if (!calls_.values) {
    return;
  }
  const auto is_bool = at::TensorOptions().dtype(at::kBool).device(step.device);
  const at::Tensor is_first = step.active.defined() ? (step.active.argmax() == step.rank).to(step.device)
                                                    : at::full({}, step.rank == 0, is_bool);
  const at::Tensor values = calls_.values(is_first);
  if (step.has_failed) {
    tensors.push_back(at::full_like(values, std::numeric_limits<double>::quiet_NaN()));
  } else {
    tensors.push_back(step.is_active ? values : at::zeros_like(values));
  }
}

void ModelBuffers::take(const Sums& sums, const StepInfo& step) {
  if (calls_.arrive && !step.has_failed) {
    calls_.arrive(sums.tensor());
  }
}

}  // namespace fastsync
