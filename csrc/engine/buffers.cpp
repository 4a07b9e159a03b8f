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

at::Tensor decode(const at::Tensor& values, const at::Tensor& like, bool is_mean) {
  const at::ScalarType dtype = c10::toRealValueType(like.scalar_type());
  const at::Tensor flat = travels_as_bytes(like, is_mean) ? values.to(at::kByte).view(dtype) : values.to(dtype);
  return like.is_complex() ? at::view_as_complex(flat.view({-1, 2})).view(like.sizes()) : flat.view(like.sizes());
}

}  // namespace

std::string Buffers::description() const {
  std::ostringstream text;
  text << "sync_buffers " << (!exist() ? "None" : means_ ? "mean" : "broadcast") << "\n";
  for (const at::Tensor& buffer : buffers_) {
    text << "synced buffer of shape " << buffer.sizes() << ", " << buffer.scalar_type() << "\n";
  }
  return text.str();
}

at::Tensor Buffers::board(const at::Tensor& riders, int64_t rank, const Weight& weight, c10::Device device,
                          bool stay_empty) const {
  std::vector<at::Tensor> all;
  if (riders.defined()) {
    all.push_back(riders);
  }
  for (const at::Tensor& buffer : buffers_) {
    at::Tensor values = encode(buffer, is_mean(buffer)).to(device, /*non_blocking=*/true);
    if (stay_empty) {
      values = at::full_like(values, std::numeric_limits<double>::quiet_NaN());
    } else if (!is_mean(buffer)) {
      values = weight.of_first_active(values, rank);
    } else if (!weight.is_active()) {
      values = at::zeros_like(values);
    }
    all.push_back(std::move(values));
  }
  return at::cat(all);
}

at::Tensor Buffers::arrive(const at::Tensor& sums, const Weight& weight, int64_t world_size) const {
  int64_t end = sums.numel();
  for (size_t i = buffers_.size(); i-- > 0;) {
    const at::Tensor& buffer = buffers_[i];
    const at::Tensor before = encode(buffer, is_mean(buffer)).to(sums.device(), /*non_blocking=*/true);
    end -= before.numel();
    const at::Tensor sum = sums.narrow(0, end, before.numel());
    const at::Tensor values = is_mean(buffer) ? weight.mean(sum, world_size) : sum;
    buffer.copy_(decode(at::where(values.isnan(), before, values), buffer, is_mean(buffer)));
  }
  return sums.narrow(0, 0, end);
}

}  // namespace fastsync
