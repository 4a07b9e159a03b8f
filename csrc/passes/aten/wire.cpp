#include "passes/aten/wire.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fastsync::aten {

namespace {

int64_t as_signed(uint64_t bits) { return static_cast<int64_t>(bits); }

// Of int64 as if it had no sign.
at::Tensor shift_right(const at::Tensor& bits, int64_t count) {
  return bits.bitwise_right_shift(count).bitwise_and(as_signed(~uint64_t{0} >> count));
}

at::Tensor low_half(const at::Tensor& bits) { return bits.bitwise_and(0xFFFFFFFFLL); }

// As block_key and random_fraction, in int64: of shape [blocks, kBlockValues].
at::Tensor random_fractions(const Rounding& rounding, const std::vector<Range>& places, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  std::vector<at::Tensor> blocks;
  for (const auto& [first, numel] : places) {
    const int64_t block = first / kBlockValues + 1;
    blocks.push_back(at::arange(block, block + numel / kBlockValues, options));
  }
  at::Tensor bits = joined(blocks).mul(as_signed(0x9E3779B97F4A7C15ULL)).add(as_signed(rounding.seed));
  if (rounding.step != nullptr) {
    bits = bits.add(over(rounding.step, 1, at::kLong, device).mul(as_signed(seed_of_step(0, 1))));
  }
  bits = bits.bitwise_xor(shift_right(bits, 30)).mul(as_signed(0xBF58476D1CE4E5B9ULL));
  bits = bits.bitwise_xor(shift_right(bits, 27)).mul(as_signed(0x94D049BB133111EBULL));
  const at::Tensor keys = shift_right(bits.bitwise_xor(shift_right(bits, 31)), 32);
  bits = low_half(keys.unsqueeze(1).add(at::arange(kBlockValues, options)));
  bits = low_half(bits.bitwise_xor(bits.bitwise_right_shift(16)).mul(0x85EBCA6BLL));
  bits = low_half(bits.bitwise_xor(bits.bitwise_right_shift(13)).mul(0xC2B2AE35LL));
  return bits.bitwise_xor(bits.bitwise_right_shift(16)).bitwise_right_shift(32 - kFractionBits);
}

// As encode_block: float32 [blocks, kBlockValues].
Encoded encode_blocks(const at::Tensor& values, const Rounding& rounding, const std::vector<Range>& places) {
  // On the device: CUDA would multiply with the inverse of a number that is on the host.
  const at::Tensor largest_int8 = at::full({1}, kLargestInt8, values.options());
  const at::Tensor amax = values.abs().amax(/*dim=*/1, /*keepdim=*/true);  // nan where one of them is
  const at::Tensor is_finite = amax.isfinite();
  const at::Tensor counted = amax.clamp_min(kSmallestAmax);
  const at::Tensor scaled = at::where(is_finite, values.mul(at::div(largest_int8, counted)), 0.0);
  const at::Tensor scales = at::where(is_finite, at::div(counted, largest_int8), std::nan(""));
  if (!rounding.is_stochastic) {
    return {scaled.round().to(at::kChar), scales};
  }
  const at::Tensor fixed = scaled.mul(kOneFixed).round().clamp(-kLargestFixed, kLargestFixed).to(at::kLong);
  const at::Tensor random = random_fractions(rounding, places, values.device());
  return {fixed.add(random).bitwise_right_shift(kFractionBits).to(at::kChar), scales};
}

}  // namespace

Encoded encode(const at::Tensor& values, DType wire, const Rounding& rounding, const std::vector<Range>& places) {
  if (wire == DType::kInt8) {
    return encode_blocks(values.to(at::kFloat).view({-1, kBlockValues}), rounding, places);
  }
  const bool is_own = wire == DType::kFloat64;
  return {(is_own ? values : values.to(at::kFloat)).to(scalar_type_of(wire)), {}};
}

at::Tensor decode(const Encoded& encoded, at::ScalarType compute) {
  const auto& [values, scales] = encoded;
  return scales.defined() ? values.to(at::kFloat).mul(scales).view(-1).to(compute) : values.to(compute);
}

std::pair<Wire::Pieces, Wire::Pieces> Wire::pieces(const std::vector<Range>& places) const {
  Pieces values, scales;
  for (const auto& [first, numel] : places) {
    if (dtype_ != DType::kInt8) {
      const at::ScalarType dtype = scalar_type_of(dtype_);
      const auto* begin = static_cast<const char*>(memory_) + first * static_cast<int64_t>(c10::elementSize(dtype));
      values.push_back(over(begin, numel, dtype, device_));
      continue;
    }
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Int8Block));
    constexpr auto kFloats = kBytes / static_cast<int64_t>(sizeof(float));
    const Int8Block* const block = unit_at<Int8Block>(memory_, first);
    const int64_t num_blocks = numel / kBlockValues;
    values.push_back(over(block->values, {num_blocks, kBlockValues}, {kBytes, 1}, at::kChar, device_));
    scales.push_back(over(&block->scale, {num_blocks, 1}, {kFloats, 1}, at::kFloat, device_));
  }
  return {values, scales};
}

Encoded Wire::read(const std::vector<Range>& places) const {
  const auto [values, scales] = pieces(places);
  return {joined(values), scales.empty() ? at::Tensor() : joined(scales)};
}

void Wire::write(const std::vector<Range>& places, const Encoded& encoded) const {
  const auto [values, scales] = pieces(places);
  put(values, encoded.values);
  if (!scales.empty()) {
    put(scales, encoded.scales);
  }
}

void Wire::clear(const std::vector<Range>& places) const {
  if (!places.empty()) {
    at::_foreach_zero_(pieces(places).first);
  }
}

at::Tensor within(const at::Tensor& scaled, const at::Tensor& source, double limit, const at::Tensor& count) {
  const double bound = scaled.scalar_type() == at::kDouble ? limit : static_cast<float>(limit);
  if (std::isinf(bound)) {
    return scaled;
  }
  const at::Tensor is_beyond = scaled.abs().gt(bound).logical_and_(source.isfinite());
  if (count.defined()) {
    count.add_(is_beyond.sum());
  }
  return at::where(is_beyond, scaled.clamp(-bound, bound), scaled);
}

double largest_of(DType dtype) {
  double largest = 0.0;
  dispatch_grad(dtype, [&](auto grad) { largest = kLargest<decltype(grad)>; });
  return largest;
}

}  // namespace fastsync::aten
