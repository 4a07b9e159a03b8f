#include "engine/named_values.h"

#include <ATen/ATen.h>

#include <limits>
#include <sstream>
#include <utility>

#include "passes/cuda_graphs.h"

namespace fastsync {

void NamedValues::put(const std::string& name, at::Tensor value) {
  if (is_capturing(value.device())) {
    given_in_graph_.insert(name);
  } else {
    given_in_graph_.erase(name);
  }
  waiting_.insert_or_assign(name, std::move(value));
}

bool NamedValues::has_slots(const std::string& name, const at::Tensor& value) const {
  const auto slots = slots_.find(name);
  return slots != slots_.end() && value.sizes() == at::IntArrayRef(slots->second);
}

std::string NamedValues::news() const {
  std::ostringstream text;
  for (const auto& [name, value] : waiting_) {
    if (!has_slots(name, value)) {
      text << "piggybacked value " << name << " of shape " << value.sizes() << "\n";
    }
  }
  return text.str();
}

void NamedValues::note_agreed() {
  for (const auto& [name, value] : waiting_) {
    slots_.insert_or_assign(name, value.sizes().vec());
  }
}

at::Tensor NamedValues::slots_of(const std::string& name, at::IntArrayRef shape, bool counts,
                                 c10::Device device) const {
  const auto sent = sent_.find(name);
  if (sent == sent_.end() || !counts) {
    const double empty = sent == sent_.end() && counts ? std::numeric_limits<double>::quiet_NaN() : 0.0;
    return at::full({c10::multiply_integers(shape)}, empty, at::TensorOptions().dtype(at::kFloat).device(device));
  }
  TORCH_CHECK_VALUE(!is_capturing(device) || given_in_graph_.contains(name), "fastsync: the value '", name,
                    "' was piggybacked outside of the CUDA graph that is captured, or on the CPU, so each replay ",
                    "would send this one value: call piggyback() inside of the capture, with a tensor on ", device);
  return sent->second.to(device, /*non_blocking=*/true).view({-1});
}

void NamedValues::add_tensors(std::vector<at::Tensor>& tensors, const StepInfo& step) {
  sent_ = step.has_failed ? Tensors() : std::exchange(waiting_, {});
  for (const auto& [name, shape] : slots_) {
    tensors.push_back(slots_of(name, shape, step.is_active || step.has_failed, step.device));
  }
}

void NamedValues::take(const Sums& sums, const StepInfo& step) {
  if (step.has_failed) {
    return;
  }
  means_.clear();
  if (sums.numel == 0) {
    return;
  }
  const at::Tensor means = step.mean_of(sums.tensor());
  int64_t offset = 0;
  for (const auto& [name, shape] : slots_) {
    const int64_t numel = c10::multiply_integers(shape);
    if (sent_.contains(name)) {
      means_[name] = means.narrow(0, offset, numel).view(shape);
    }
    offset += numel;
  }
}

}  // namespace fastsync
