#include "engine/side_values.h"

#include <ATen/ATen.h>

#include <limits>
#include <sstream>
#include <utility>

#include "passes/backend.h"

namespace fastsync {

// ---- flags ----------------------------------------------------------------------------------------------------------

void SideValues::lay_out(size_t num_flags, int64_t num_ranks) {
  none_ = 1.0F / (8.0F * static_cast<float>(num_ranks));
  flags_.assign(num_flags, none_);
  fixed_on_device_.reset();
}

bool SideValues::on_some_rank(size_t flag, const std::string& parameter) {
  constexpr int64_t kManyWaits = 100;
  if (is_here(flag)) {
    return true;
  }
  if (!counts_.defined()) {
    TORCH_CHECK(!is_captured_, "fastsync: parameter ", parameter, " has no gradient here, and whether another rank ",
                "has one cannot be found out while a CUDA graph is captured: take a step like this one before");
    counts_ = sums_.narrow(0, 0, static_cast<int64_t>(flags_.size())).to(at::kCPU);
  }
  const bool exists = counts_.const_data_ptr<float>()[flag] > 0.5F;
  if (!exists && num_waits_ == kManyWaits && !sums_.is_cpu()) {
    num_waits_ += 1;  // said once
    TORCH_WARN("fastsync: parameter ", parameter, " has had no gradient on any rank for ", kManyWaits,
               " steps. Each step the host waits for the device to find that out; freeze what is not used ",
               "(requires_grad_(False)), and it no longer does");
  }
  return exists;
}

// Made anew only when they change, which a CUDA graph cannot.
at::Tensor SideValues::flags_and_stamp(c10::Device device) {
  std::vector<float> fixed = flags_;
  fixed.insert(fixed.end(), stamp_.begin(), stamp_.end());
  if (!fixed_on_device_.defined() || fixed != fixed_) {
    TORCH_CHECK(!is_capturing(device), "fastsync: other parameters have a gradient in the step that a CUDA graph ",
                "captures than in the one before it: take a step like this one before");
    fixed_on_device_ = to_device(fixed, device);
    fixed_ = std::move(fixed);
  }
  if (is_capturing(device)) {
    captured_.push_back(fixed_on_device_);
  }
  return fixed_on_device_;
}

// ---- named values ---------------------------------------------------------------------------------------------------

void SideValues::put(const std::string& name, at::Tensor value) {
  if (is_capturing(value.device())) {
    given_in_graph_.insert(name);
  } else {
    given_in_graph_.erase(name);
  }
  waiting_.insert_or_assign(name, std::move(value));
}

bool SideValues::has_slots(const std::string& name, const at::Tensor& value) const {
  const auto slots = slots_.find(name);
  return slots != slots_.end() && value.sizes() == at::IntArrayRef(slots->second);
}

std::string SideValues::newcomers() const {
  std::ostringstream text;
  for (const auto& [name, value] : waiting_) {
    if (!has_slots(name, value)) {
      text << "piggybacked value " << name << " of shape " << value.sizes() << "\n";
    }
  }
  return text.str();
}

void SideValues::make_slots() {
  for (const auto& [name, value] : waiting_) {
    slots_.insert_or_assign(name, value.sizes().vec());
  }
}

at::Tensor SideValues::slots_of(const std::string& name, at::IntArrayRef shape, bool counts, c10::Device device) const {
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

// ---- one sync -------------------------------------------------------------------------------------------------------

at::Tensor SideValues::to_send(std::optional<std::vector<float>> stamp, bool counts, bool has_failed,
                               c10::Device device) {
  has_new_stamp_ = stamp.has_value();
  if (has_new_stamp_) {
    stamp_ = std::move(*stamp);
  }
  sent_ = has_failed ? Tensors() : std::exchange(waiting_, {});
  std::vector<at::Tensor> all{flags_and_stamp(device)};
  for (const auto& [name, shape] : slots_) {
    all.push_back(slots_of(name, shape, counts || has_failed, device));
  }
  return all.size() == 1 ? all.front() : at::cat(all);
}

void SideValues::arrive(const at::Tensor& sums, bool is_captured) {
  sums_ = sums;
  num_waits_ = counts_.defined() ? num_waits_ + 1 : 0;
  is_captured_ = is_captured;
  if (!is_captured) {
    counts_.reset();
  }
}

at::Tensor SideValues::stamps() const {
  const auto size = static_cast<int64_t>(stamp_.size());
  return has_new_stamp_ ? sums_.narrow(0, num_fixed() - size, size) : at::Tensor();
}

SideValues::Tensors SideValues::by_name(const at::Tensor& named) const {
  Tensors found;
  int64_t offset = 0;
  for (const auto& [name, shape] : slots_) {
    const int64_t numel = c10::multiply_integers(shape);
    if (sent_.contains(name)) {
      found[name] = named.narrow(0, offset, numel).view(shape);
    }
    offset += numel;
  }
  return found;
}

}  // namespace fastsync
