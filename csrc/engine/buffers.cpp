#include "engine/buffers.h"

#include <ATen/ATen.h>

#include <limits>
#include <sstream>

namespace fastsync {

namespace {

// Those that float32 holds travel as values, others as bytes.
bool travels_as_bytes(const at::Tensor& buffer, bool is_mean) {
  const at::ScalarType dtype = c10::toRealValueType(buffer.scalar_type());
  return !is_mean && dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16;
}

at::Tensor encode(const at::Tensor& buffer, bool is_mean) {
  const at::Tensor flat = (buffer.is_complex() ? at::view_as_real(buffer.resolve_conj()) : buffer).reshape({-1});
  return (travels_as_bytes(buffer, is_mean) ? flat.view(at::kByte) : flat).to(at::kFloat);
}

// How many float32 values it travels as.
int64_t num_values(const at::Tensor& buffer, bool is_mean) {
  return travels_as_bytes(buffer, is_mean) ? static_cast<int64_t>(buffer.nbytes())
                                           : buffer.numel() * (buffer.is_complex() ? 2 : 1);
}

at::Tensor decode(const at::Tensor& values, const at::Tensor& like, bool is_mean) {
  const at::ScalarType dtype = c10::toRealValueType(like.scalar_type());
  const at::Tensor flat = travels_as_bytes(like, is_mean) ? values.to(at::kByte).view(dtype) : values.to(dtype);
  // A complex number begins at an even offset, which what is narrowed need not have.
  return like.is_complex() ? at::view_as_complex(flat.clone().view({-1, 2})).view(like.sizes())
                           : flat.view(like.sizes());
}

}  // namespace

bool Buffers::look_up() {
  if (!find_) {
    return false;
  }
  const std::string before = description();
  buffers_ = find_();
  return description() != before;
}

std::string Buffers::description() const {
  std::ostringstream text;
  text << "broadcast_buffers " << (!exist() ? "False" : means_ ? "mean" : "True") << "\n";
  for (const at::Tensor& buffer : buffers_) {
    text << "buffer of shape " << buffer.sizes() << ", " << buffer.scalar_type() << "\n";
  }
  return text.str();
}

// Behind them the number of ranks that have buffers, nan where one has failed.
at::Tensor Buffers::to_send(int64_t rank, const Weight& weight, c10::Device device, bool has_failed) const {
  if (!exist()) {
    return {};
  }
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  std::vector<at::Tensor> all;
  for (const at::Tensor& buffer : buffers_) {
    if (has_failed) {
      all.push_back(at::full({num_values(buffer, is_mean(buffer))}, kNan, options));
      continue;
    }
    const at::Tensor values = encode(buffer, is_mean(buffer)).to(device, /*non_blocking=*/true);
    if (!is_mean(buffer)) {
      all.push_back(weight.of_first_active(values, rank));
    } else {
      all.push_back(weight.is_active() ? values : at::zeros_like(values));
    }
  }
  all.push_back(at::full({1}, has_failed ? kNan : weight.is_active() ? 1.0 : 0.0, options));
  return at::cat(all);
}

void Buffers::arrive(const at::Tensor& sums, const Weight& weight, int64_t world_size) const {
  if (!exist()) {
    return;
  }
  const at::Tensor have_come = sums.select(0, sums.numel() - 1) > 0;
  int64_t begin = 0;
  for (const at::Tensor& buffer : buffers_) {
    const int64_t length = num_values(buffer, is_mean(buffer));
    const at::Tensor sum = sums.narrow(0, begin, length);
    const at::Tensor values = decode(is_mean(buffer) ? weight.mean(sum, world_size) : sum, buffer, is_mean(buffer));
    buffer.copy_(at::where(have_come, values, buffer.to(values.device())));
    begin += length;
  }
}

}  // namespace fastsync
