#include "passes/aten/passes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "passes/backend.h"

namespace fastsync::aten {

namespace {

// ---- tensors over raw pointers --------------------------------------------------------------------------------------

// Makes a tensor over memory that somebody else keeps alive.
at::Tensor over(const void* data, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

// Makes a number on the host, which operators take beside tensors of any device.
at::Tensor number(double value, at::ScalarType dtype) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(dtype));
}

// Joins tensors along the first dimension. A single tensor is not copied.
at::Tensor joined(const std::vector<at::Tensor>& tensors) {
  return tensors.size() == 1 ? tensors.front() : at::cat(tensors);
}

// The reverse of joined: copies the values into these tensors.
void copy_into(const std::vector<at::Tensor>& tensors, const at::Tensor& values) {
  std::vector<int64_t> lengths;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(lengths),
                 [](const at::Tensor& tensor) { return tensor.size(0); });
  at::_foreach_copy_(tensors, values.split_with_sizes(lengths));
}

// The segments of a call, without empty ones. The passes work on one tensor of all their values, in which zeros fill up
// the last unit of each segment.
class Segments {
 public:
  Segments(const Segment* segments, int64_t num_segments, DType wire, c10::Device device)
      : unit_(unit_of(wire).values), device_(device) {
    std::copy_if(segments, segments + num_segments, std::back_inserter(segments_),
                 [](const Segment& segment) { return segment.numel > 0; });
  }

  bool empty() const { return segments_.empty(); }

  // Whether the segments have this memory. All of them have, or none.
  bool have(void* Segment::* memory) const { return segments_.front().*memory != nullptr; }

  // Makes tensors over a wire's memory, one for each run of segments without a gap. A tensor has values, or the bytes
  // of blocks [blocks, bytes].
  std::vector<at::Tensor> on_wire(const void* wire, DType dtype) const {
    const WireUnit unit = unit_of(dtype);
    std::vector<at::Tensor> tensors;
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const int64_t begin = segment->offset;
      int64_t end = begin;
      for (; segment != segments_.end() && segment->offset == end; ++segment) {
        end += padded(segment->numel);
      }
      const char* const data = static_cast<const char*>(wire) + begin / unit.values * unit.bytes;
      tensors.push_back(unit.values == 1 ? over(data, {end - begin}, scalar_type_of(dtype), device_)
                                         : over(data, {(end - begin) / unit.values, unit.bytes}, at::kByte, device_));
    }
    return tensors;
  }

  at::Tensor gather(void* Segment::* memory, at::ScalarType dtype) const {
    std::vector<at::Tensor> tensors;
    for (const Segment& segment : segments_) {
      tensors.push_back(over(segment.*memory, {segment.numel}, dtype, device_));
      if (const int64_t numel = padded(segment.numel) - segment.numel; numel > 0) {
        tensors.push_back(at::zeros({numel}, tensors.back().options()));
      }
    }
    return joined(tensors);
  }

  void scatter(const at::Tensor& values, void* Segment::* memory, at::ScalarType dtype, int64_t shift = 0) const {
    std::vector<at::Tensor> tensors;
    for (const Segment& segment : segments_) {
      tensors.push_back(over(static_cast<char*>(segment.*memory) + shift, {segment.numel}, dtype, device_));
    }
    at::_foreach_copy_(tensors, split(values));
  }

  // Makes a tensor with each value's factor.
  at::Tensor factors(at::ScalarType compute) const {
    std::vector<at::Tensor> tensors;
    for (const Segment& segment : segments_) {
      const at::Tensor factor = over(segment.factor(), {1}, at::kDouble, device_).to(compute);
      tensors.push_back(factor.expand({padded(segment.numel)}));
    }
    return joined(tensors);
  }

  at::Tensor without_padding(const at::Tensor& values) const {
    const bool is_padded = std::any_of(segments_.begin(), segments_.end(),
                                       [&](const Segment& each) { return padded(each.numel) != each.numel; });
    return is_padded ? at::cat(split(values)) : values;
  }

 private:
  int64_t padded(int64_t numel) const { return (numel + unit_ - 1) / unit_ * unit_; }

  // Splits the tensor of all values into the values of each segment.
  std::vector<at::Tensor> split(const at::Tensor& values) const {
    std::vector<at::Tensor> tensors;
    int64_t begin = 0;
    for (const Segment& segment : segments_) {
      tensors.push_back(values.narrow(0, begin, segment.numel));
      begin += padded(segment.numel);
    }
    return tensors;
  }

  std::vector<Segment> segments_;
  int64_t unit_;
  c10::Device device_;
};

// ---- the arithmetic of wire_format.h on whole tensors ---------------------------------------------------------------

// Packs whole numbers of so many bits, int32 [blocks, kBlockValues], into bytes.
at::Tensor to_bytes(const at::Tensor& numbers, int bits) {
  const at::Tensor shifts = at::arange(0, 8, bits, numbers.options());
  const at::Tensor fields = numbers.bitwise_and((1 << bits) - 1).view({numbers.size(0), -1, 8 / bits});
  return fields.bitwise_left_shift(shifts).sum(2).to(at::kByte);
}
// Unpacks what to_bytes has packed.
at::Tensor to_numbers(const at::Tensor& bytes, int bits) {
  const at::Tensor shifts = at::arange(0, 8, bits, bytes.options().dtype(at::kInt));
  const at::Tensor fields = bytes.to(at::kInt).unsqueeze(2).bitwise_right_shift(shifts).bitwise_and((1 << bits) - 1);
  const int sign = 1 << (bits - 1);
  return fields.bitwise_xor(sign).sub(sign).view({bytes.size(0), -1});
}

// Encodes float32 values [blocks, kBlockValues] to blocks, as bytes. Scales are those of block_scale and block_inverse.
at::Tensor encode_blocks(const at::Tensor& values, int bits) {
  // The divisor is on the device, because CUDA would multiply with the inverse of a divisor on the host.
  const at::Tensor largest = at::full({1}, largest_number(bits), values.options());
  const at::Tensor amax = values.abs().amax(/*dim=*/1, /*keepdim=*/true);  // nan if a value of the block is nan
  const at::Tensor is_finite = amax.isfinite();
  const at::Tensor counted = amax.clamp_min(kSmallestAmax);
  const at::Tensor numbers = at::where(is_finite, values.mul(at::div(largest, counted)), 0.0).round().to(at::kInt);
  const at::Tensor scales = at::where(is_finite, at::div(counted, largest), std::nan(""));
  return at::cat({scales.view(at::kByte), to_bytes(numbers, bits)}, 1);
}

at::Tensor encode(const at::Tensor& values, DType wire) {
  if (const WireUnit unit = unit_of(wire); unit.values > 1) {
    return encode_blocks(values.to(at::kFloat).view({-1, unit.values}), unit.bits);
  }
  return (wire == DType::kFloat64 ? values : values.to(at::kFloat)).to(scalar_type_of(wire));
}

at::Tensor decode(const at::Tensor& encoded, DType wire, at::ScalarType compute) {
  if (const WireUnit unit = unit_of(wire); unit.values > 1) {
    const at::Tensor scales = encoded.narrow(1, 0, sizeof(float)).contiguous().view(at::kFloat);
    const at::Tensor bytes = encoded.narrow(1, sizeof(float), unit.bytes - sizeof(float));
    return to_numbers(bytes, unit.bits).to(at::kFloat).mul(scales).view(-1).to(compute);
  }
  return encoded.to(compute);
}

// Clamps scaled values to ±limit, unless their source is inf or nan. Adds to the count how many were beyond it.
at::Tensor clamped(const at::Tensor& scaled, const at::Tensor& source, double limit, const at::Tensor& count = {}) {
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

// Returns the largest magnitude that values may have before they are encoded, as limit_on does.
double limit_of(DType wire, double limit) {
  dispatch(wire, [&](auto w) { limit = limit_on<decltype(w), double>(limit); });
  return limit;
}

// ---- what the passes have in common ---------------------------------------------------------------------------------

at::ScalarType compute_of(DType grad) { return compute_dtype(scalar_type_of(grad)); }

// Returns the scale as a tensor of one element.
at::Tensor scale_or_one(const float* bucket_scale, at::ScalarType compute, c10::Device device) {
  return bucket_scale == nullptr ? number(1.0, compute) : over(bucket_scale, {1}, at::kFloat, device).to(compute);
}

// Adds up the segments' values on each wire, times the multiplier. The values of a single wire may be returned
// uncopied.
at::Tensor sum_wires(const Segments& segments, const void* first, int64_t num_wires, int64_t stride_bytes, DType dtype,
                     double multiplier, bool by_tree, at::ScalarType compute) {
  const auto times_multiplier = [&](const at::Tensor& values) {
    return multiplier != 1.0 ? values.mul(number(multiplier, compute)) : values;
  };
  std::vector<at::Tensor> sums;  // those that wait for another one; of wires in order one at most
  for (int64_t r = 0; r < num_wires; ++r) {
    const char* const wire = static_cast<const char*>(first) + r * stride_bytes;
    const at::Tensor values = decode(joined(segments.on_wire(wire, dtype)), dtype, compute);
    sums.push_back(by_tree ? values : times_multiplier(values));
    for (int left = by_tree ? sums_behind_wire(r, num_wires) : std::min<int>(1, r); left > 0; --left) {
      const at::Tensor right = std::move(sums.back());
      sums.pop_back();
      sums.back() = sums.back().add(right);
    }
  }
  return by_tree ? times_multiplier(sums.front()) : sums.front();
}

void begin_stats(const at::Tensor& stats) {
  for (const int stat : {kSumOfSquares, kNumNonfinite, kMaxMagnitude}) {
    stats.select(0, stat).zero_();
  }
}

// Adds the statistics of values, which have the gradients' dtype.
void add_to_stats(const at::Tensor& values, const at::Tensor& stats) {
  const at::Tensor is_finite = values.isfinite();
  stats.select(0, kSumOfSquares).add_(values.to(at::kDouble).square().sum());
  stats.select(0, kNumNonfinite).add_(is_finite.logical_not().sum());
  const at::Tensor largest = stats.select(0, kMaxMagnitude);
  largest.copy_(at::maximum(largest, at::where(is_finite, values.abs(), 0.0).max().to(at::kDouble)));
}

// Sets the scale for the next step.
void move_on(float* bucket_scale, const at::Tensor& stats, double scale_share, c10::Device device) {
  const at::Tensor scale = over(bucket_scale, {1}, at::kFloat, device);
  scale.copy_(next_scale(scale, stats.narrow(0, kMaxMagnitude, 1).mul(scale_share)));
}

}  // namespace

at::Tensor next_scale(const at::Tensor& scale, const at::Tensor& largest) {
  const at::Tensor exponent = std::get<1>(at::frexp(scale)).sub(1);
  const at::Tensor risen = exponent.add(1);
  const at::Tensor idle = at::maximum(exponent, risen.clamp_max(kMaxIdleScaleExponent));
  return power_of_two(at::where(largest.gt(0), at::minimum(scale_exponent_for(largest), risen), idle));
}

at::Tensor scale_exponent_for(const at::Tensor& largest) {
  const at::Tensor wanted = at::rsub(std::get<1>(at::frexp(largest)), kTargetExponent);
  return wanted.clamp(-kMaxScaleExponent, kMaxScaleExponent).to(at::kInt);
}

at::Tensor power_of_two(const at::Tensor& exponent) {
  return exponent.to(at::kInt).add(127).mul(1 << 23).view(at::kFloat);
}

void pack(const PackArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::ScalarType grad = scalar_type_of(args.grad_dtype);
  const at::ScalarType compute = compute_of(args.grad_dtype);
  const at::Tensor num_saturated = over(args.stats + kNumSaturated, {1}, at::kDouble, device);
  if (args.position.is_first) {
    num_saturated.zero_();
  }
  const Segments segments(args.segments, args.num_segments, args.wire_dtype, device);
  if (segments.empty()) {
    return;
  }
  at::Tensor values = segments.gather(&Segment::data, grad).to(compute);
  at::Tensor weight;
  if (args.weight != nullptr) {
    weight = over(args.weight, {1}, at::kDouble, device).to(compute);
    values = at::where(weight.eq(0), 0.0, values);
  }
  at::Tensor factor = number(args.multiplier, compute).mul(scale_or_one(args.bucket_scale, compute, device));
  at::Tensor residual;
  if (segments.have(&Segment::operand)) {
    values = weight.defined() ? values.mul(weight) : values;
    residual = segments.gather(&Segment::operand, compute);
    values = values.add(residual);
  } else if (weight.defined()) {
    factor = factor.mul(weight);
  }
  const at::Tensor scaled = clamped(values.mul(factor), values, limit_of(args.wire_dtype, args.limit), num_saturated);
  if (args.gap_alignment > 1) {
    const Segment& last = args.segments[args.num_segments - 1];
    const int64_t numel = last.offset + last.numel + gap_behind(last, args.gap_alignment);
    over(args.wire, {numel}, scalar_type_of(args.wire_dtype), device).zero_();
  }
  const at::Tensor encoded = encode(scaled, args.wire_dtype);
  copy_into(segments.on_wire(args.wire, args.wire_dtype), encoded);
  if (residual.defined()) {
    const at::Tensor sent = decode(encoded, args.wire_dtype, compute);
    const double largest = largest_of(compute == at::kDouble ? DType::kFloat64 : DType::kFloat32);
    const at::Tensor lost = values.sub(clamped(sent.mul(factor.reciprocal()), sent, largest));
    segments.scatter(at::where(sent.isfinite(), lost, residual), &Segment::operand, compute, args.residual_shift);
  }
}

void unpack(const UnpackArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::ScalarType grad = scalar_type_of(args.grad_dtype);
  const at::ScalarType compute = compute_of(args.grad_dtype);
  const at::Tensor stats = over(args.stats, {kNumStats}, at::kDouble, device);
  if (args.position.is_first) {
    begin_stats(stats);
  }
  const Segments segments(args.segments, args.num_segments, args.wire_dtype, device);
  if (!segments.empty()) {
    const at::Tensor sum = sum_wires(segments, args.wire, args.num_wires, args.stride_bytes, args.wire_dtype,
                                     args.multiplier, args.by_tree, compute);
    at::Tensor factor;
    if (args.bucket_scale != nullptr) {
      factor = scale_or_one(args.bucket_scale, compute, device).reciprocal();
    }
    if (segments.have(&Segment::operand)) {
      const at::Tensor own = segments.factors(compute);
      factor = factor.defined() ? factor.mul(own) : own;
    }
    at::Tensor values = factor.defined() ? sum.mul(factor) : sum;
    if (factor.defined() || grad != compute) {
      const at::Tensor is_beyond = sum.isfinite().logical_and_(values.to(grad).isfinite().logical_not_());
      stats.select(0, kNumSaturated).add_(segments.without_padding(is_beyond).sum());
      values = clamped(values, sum, largest_of(args.grad_dtype));
    }
    values = values.to(grad);
    segments.scatter(values, &Segment::data, grad);
    add_to_stats(segments.without_padding(values), stats);
  }
  if (args.position.is_last && args.bucket_scale != nullptr) {
    move_on(args.bucket_scale, stats, args.scale_share, device);
  }
}

void measure(at::TensorList grads, const at::Tensor& stats) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  begin_stats(stats);
  std::vector<at::Tensor> values;
  for (const at::Tensor& grad : grads) {
    if (grad.numel() > 0) {
      values.push_back(grad.reshape({-1}));
    }
  }
  if (!values.empty()) {
    add_to_stats(joined(values), stats);
  }
}

void reduce(const ReduceArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const Segment all{nullptr, args.numel, 0};
  const Segments segments(&all, 1, args.wire_dtype, device);
  if (segments.empty()) {
    return;
  }
  const at::ScalarType compute = compute_of(args.grad_dtype);
  at::Tensor values = sum_wires(segments, args.wire, args.num_wires, args.stride_bytes, args.wire_dtype,
                                args.multiplier, args.by_tree, compute);
  const at::Tensor scale = scale_or_one(args.bucket_scale, compute, device).mul(args.residual_share);
  at::Tensor residual;
  if (args.residual != nullptr) {
    residual = over(args.residual, {args.numel}, compute, device);
    values = values.add(residual.mul(scale));
  }
  const at::Tensor encoded = encode(clamped(values, values, limit_of(args.out_dtype, args.limit)), args.out_dtype);
  copy_into(segments.on_wire(args.out, args.out_dtype), encoded);
  if (residual.defined()) {
    const at::Tensor sent = decode(encoded, args.out_dtype, compute);
    const at::Tensor lost = values.sub(sent).mul(scale.reciprocal());
    residual.copy_(at::where(sent.isfinite(), lost, residual));
  }
}

}  // namespace fastsync::aten
