#include "engine/piggyback.h"

#include <ATen/ATen.h>

#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include "passes/backend.h"
#include "transport/agreement.h"

namespace fastsync {

void Riders::add(const std::string& name, const at::Tensor& value) {
  waiting_.insert_or_assign(name, value.detach().clone(at::MemoryFormat::Contiguous));
  if (is_capturing(value.device())) {
    captured_.insert(name);
  } else {
    captured_.erase(name);
  }
}

bool Riders::has_seat(const std::string& name, const at::Tensor& value) const {
  const auto seat = seats_.find(name);
  return seat != seats_.end() && seat->second.sizes() == value.sizes();
}

const std::string* Riders::need_agreement() const {
  for (const auto& [name, value] : waiting_) {
    if (!has_seat(name, value)) {
      return &name;
    }
  }
  return nullptr;
}

void Riders::agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::Device device) {
  check_agreement(group, newcomers(), device);
  seat_newcomers();
}

std::string Riders::newcomers() const {
  std::ostringstream text;
  for (const auto& [name, value] : waiting_) {
    if (!has_seat(name, value)) {
      text << "rider " << name << " of shape " << value.sizes() << "\n";
    }
  }
  return text.str();
}

void Riders::seat_newcomers() {
  for (const auto& [name, value] : waiting_) {
    seats_.insert_or_assign(name, at::full(value.sizes(), std::numeric_limits<float>::quiet_NaN()));
  }
}

at::Tensor Riders::board(c10::Device device, bool stay_empty) {
  aboard_ = stay_empty ? Tensors() : std::exchange(waiting_, {});
  std::vector<at::Tensor> values;
  for (const auto& [name, seat] : seats_) {
    const auto rider = aboard_.find(name);
    if (rider == aboard_.end()) {
      constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
      values.push_back(at::full({seat.numel()}, kNan, at::TensorOptions().dtype(at::kFloat).device(device)));
      continue;
    }
    TORCH_CHECK_VALUE(!is_capturing(device) || captured_.contains(name), "fastsync: rider '", name, "' was given ",
                      "outside of the CUDA graph that is captured, or on the CPU, so each replay would send this one ",
                      "value: call ride() inside of the capture, with a tensor on ", device);
    values.push_back(rider->second.to(device, /*non_blocking=*/true).view({-1}));
  }
  if (values.size() == 1) {  // is not copied again
    return values.front();
  }
  return values.empty() ? at::Tensor() : at::cat(values);
}

void Riders::arrive(const at::Tensor& means) {
  means_.clear();
  int64_t offset = 0;
  for (const auto& [name, seat] : seats_) {
    if (aboard_.count(name) != 0) {
      means_[name] = means.narrow(0, offset, seat.numel()).view(seat.sizes());
    }
    offset += seat.numel();
  }
}

}  // namespace fastsync
