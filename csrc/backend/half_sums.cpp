#include "backend/half_sums.h"

#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>

namespace fastsync {

namespace {

void add(at::ScalarType dtype, const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes) {
  const auto values = [&](const std::byte* data) {
    return at::from_blob(const_cast<std::byte*>(data), {bytes / 2}, at::TensorOptions(dtype));
  };
  at::Tensor sum = values(out);
  at::add_out(sum, values(a), values(b));
}

}  // namespace

void add_halves(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes) {
  add(at::kHalf, a, b, out, bytes);
}

void add_bfloat16s(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes) {
  add(at::kBFloat16, a, b, out, bytes);
}

}  // namespace fastsync
