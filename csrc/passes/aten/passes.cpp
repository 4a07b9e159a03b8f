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

// ---- memory that the passes are given as raw pointers ---------------------------------------------------------------

// A tensor in somebody else's memory, for as long as that lives.
at::Tensor over(const void* data, at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

// One number, which the device need not be told: operators take it beside tensors of any device.
at::Tensor number(double value, at::ScalarType dtype) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(dtype));
}

// One after the other, along the first dimension.
at::Tensor joined(const std::vector<at::Tensor>& pieces) {
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces);
}

// The other way round: into places that are as long together.
void put(const std::vector<at::Tensor>& places, const at::Tensor& values) {
  if (places.size() == 1) {
    places.front().copy_(values);
    return;
  }
  std::vector<int64_t> lengths;
  std::transform(places.begin(), places.end(), std::back_inserter(lengths),
                 [](const at::Tensor& place) { return place.size(0); });
  at::_foreach_copy_(places, values.split_with_sizes(lengths));
}

// The segments that have values, of which one vector holds all, one after the other. Each begins a unit of the wire,
// and zeros fill up its last one.
class Segments {
 public:
  Segments(const Segment* segments, int64_t num_segments, DType wire, c10::Device device)
      : unit_(unit_of(wire).values), device_(device) {
    std::copy_if(segments, segments + num_segments, std::back_inserter(segments_),
                 [](const Segment& segment) { return segment.numel > 0; });
  }

  bool empty() const { return segments_.empty(); }

  // Where they are on a wire, neighbours as one: its values, or the [blocks, bytes] of its blocks.
  std::vector<at::Tensor> places(const void* wire, DType dtype) const {
    const WireUnit unit = unit_of(dtype);
    std::vector<at::Tensor> places;
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const int64_t begin = segment->offset;
      int64_t end = begin;
      for (; segment != segments_.end() && segment->offset == end; ++segment) {
        end += padded(segment->numel);
      }
      const char* const data = static_cast<const char*>(wire) + begin / unit.values * unit.bytes;
      places.push_back(unit.values == 1 ? over(data, {end - begin}, scalar_type_of(dtype), device_)
                                        : over(data, {(end - begin) / unit.values, unit.bytes}, at::kByte, device_));
    }
    return places;
  }

  // The filler stands for what does not have the field.
  at::Tensor gather(void* Segment::* field, at::ScalarType dtype, double filler = 0.0) const {
    const auto options = at::TensorOptions().dtype(dtype).device(device_);
    std::vector<at::Tensor> pieces;
    for (const Segment& segment : segments_) {
      pieces.push_back(segment.*field == nullptr ? at::full({segment.numel}, filler, options)
                                                 : over(segment.*field, {segment.numel}, dtype, device_));
      if (const int64_t numel = padded(segment.numel) - segment.numel; numel > 0) {
        pieces.push_back(at::zeros({numel}, options));
      }
    }
    return joined(pieces);
  }

  bool any(void* Segment::* field) const {
    return std::any_of(segments_.begin(), segments_.end(), [&](const Segment& each) { return each.*field != nullptr; });
  }

  // To what has the field.
  void scatter(const at::Tensor& values, void* Segment::* field, at::ScalarType dtype) const {
    const auto pieces = split(values);
    std::vector<at::Tensor> from, to;
    for (size_t i = 0; i < segments_.size(); ++i) {
      if (segments_[i].*field != nullptr) {
        from.push_back(pieces[i]);
        to.push_back(over(segments_[i].*field, {segments_[i].numel}, dtype, device_));
      }
    }
    at::_foreach_copy_(to, from);
  }

  // Without what fills up units.
  at::Tensor without_padding(const at::Tensor& values) const {
    const bool is_padded = std::any_of(segments_.begin(), segments_.end(),
                                       [&](const Segment& each) { return padded(each.numel) != each.numel; });
    return is_padded ? at::cat(split(values)) : values;
  }

 private:
  int64_t padded(int64_t numel) const { return (numel + unit_ - 1) / unit_ * unit_; }

  std::vector<at::Tensor> split(const at::Tensor& values) const {
    std::vector<at::Tensor> pieces;
    int64_t begin = 0;
    for (const Segment& segment : segments_) {
      pieces.push_back(values.narrow(0, begin, segment.numel));
      begin += padded(segment.numel);
    }
    return pieces;
  }

  std::vector<Segment> segments_;
  int64_t unit_;
  c10::Device device_;
};

// ---- values to a wire's and back: wire_format.h in whole tensors ----------------------------------------------------

// Of whole numbers of so many bits, int32 [blocks, kBlockValues], the bytes that they take, and back.
at::Tensor bytes_of(const at::Tensor& numbers, int bits) {
  const at::Tensor shifts = at::arange(0, 8, bits, numbers.options());
  const at::Tensor fields = numbers.bitwise_and((1 << bits) - 1).view({numbers.size(0), -1, 8 / bits});
  return fields.bitwise_left_shift(shifts).sum(2).to(at::kByte);
}
at::Tensor numbers_of(const at::Tensor& bytes, int bits) {
  const at::Tensor shifts = at::arange(0, 8, bits, bytes.options().dtype(at::kInt));
  const at::Tensor fields = bytes.to(at::kInt).unsqueeze(2).bitwise_right_shift(shifts).bitwise_and((1 << bits) - 1);
  const int sign = 1 << (bits - 1);
  return fields.bitwise_xor(sign).sub(sign).view({bytes.size(0), -1});
}

// As the other backends' encode of a block: float32 [blocks, kBlockValues].
at::Tensor encode_blocks(const at::Tensor& values, int bits) {
  // On the device: CUDA would multiply with the inverse of a number that is on the host.
  const at::Tensor largest = at::full({1}, largest_number(bits), values.options());
  const at::Tensor amax = values.abs().amax(/*dim=*/1, /*keepdim=*/true);  // nan where one of them is
  const at::Tensor is_finite = amax.isfinite();
  const at::Tensor counted = amax.clamp_min(kSmallestAmax);
  const at::Tensor numbers = at::where(is_finite, values.mul(at::div(largest, counted)), 0.0).round().to(at::kInt);
  const at::Tensor scales = at::where(is_finite, at::div(counted, largest), std::nan(""));
  return at::cat({scales.view(at::kByte), bytes_of(numbers, bits)}, 1);
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
    return numbers_of(bytes, unit.bits).to(at::kFloat).mul(scales).view(-1).to(compute);
  }
  return encoded.to(compute);
}

// What of the scaled values is beyond ±limit though its source is finite becomes ±limit, and is added to the count.
at::Tensor within(const at::Tensor& scaled, const at::Tensor& source, double limit, const at::Tensor& count = {}) {
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

// As limit_on for the type of the wire.
double limit_of(DType wire, double limit) {
  dispatch(wire, [&](auto w) { limit = limit_on<decltype(w), double>(limit); });
  return limit;
}

// ---- what passes have in common -------------------------------------------------------------------------------------

at::ScalarType compute_of(DType grad) { return compute_dtype(scalar_type_of(grad)); }

// One element; a number where there is none.
at::Tensor scale_or_one(const float* bucket_scale, at::ScalarType compute, c10::Device device) {
  return bucket_scale == nullptr ? number(1.0, compute) : over(bucket_scale, {1}, at::kFloat, device).to(compute);
}

// The sum over the wires of their values there, each times the multiplier. May be the wire itself.
at::Tensor sum_wires(const Segments& segments, const void* first, int64_t num_wires, int64_t stride_bytes, DType dtype,
                     double multiplier, at::ScalarType compute) {
  at::Tensor sum;
  for (int64_t r = 0; r < num_wires; ++r) {
    const char* const wire = static_cast<const char*>(first) + r * stride_bytes;
    at::Tensor values = decode(joined(segments.places(wire, dtype)), dtype, compute);
    if (multiplier != 1.0) {
      values = values.mul(number(multiplier, compute));
    }
    sum = sum.defined() ? sum.add(values) : values;
  }
  return sum;
}

void begin_stats(const at::Tensor& stats) {
  for (const int stat : {kSumOfSquares, kNumNonfinite, kMaxMagnitude}) {
    stats.select(0, stat).zero_();
  }
}

// Of the gradients' own dtype.
void add_to_stats(const at::Tensor& values, const at::Tensor& stats) {
  const at::Tensor is_finite = values.isfinite();
  stats.select(0, kSumOfSquares).add_(values.to(at::kDouble).square().sum());
  stats.select(0, kNumNonfinite).add_(is_finite.logical_not().sum());
  const at::Tensor largest = stats.select(0, kMaxMagnitude);
  largest.copy_(at::maximum(largest, at::where(is_finite, values.abs(), 0.0).max().to(at::kDouble)));
}

// As next_bucket_scale.
void move_on(float* bucket_scale, const at::Tensor& stats, double scale_share, c10::Device device) {
  const at::Tensor scale = over(bucket_scale, {1}, at::kFloat, device);
  const at::Tensor largest = stats.narrow(0, kMaxMagnitude, 1).mul(scale_share);
  const at::Tensor exponent = std::get<1>(at::frexp(scale)).sub(1);
  const at::Tensor risen = exponent.add(1);
  const at::Tensor idle = at::maximum(exponent, risen.clamp_max(kMaxIdleScaleExponent));
  const at::Tensor next = at::where(largest.gt(0), at::minimum(scale_exponent_for(largest), risen), idle);
  scale.copy_(power_of_two(next));
}

}  // namespace

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
  if (args.turn.is_first) {
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
  at::Tensor kept;
  if (segments.any(&Segment::residual)) {
    values = weight.defined() ? values.mul(weight) : values;
    kept = segments.gather(&Segment::residual, compute,
                           /*filler=*/-0.0);  // which leaves a zero's sign as it is
    values = values.add(kept);
  } else if (weight.defined()) {
    factor = factor.mul(weight);
  }
  const at::Tensor scaled = within(values.mul(factor), values, limit_of(args.wire_dtype, args.limit), num_saturated);
  const at::Tensor encoded = encode(scaled, args.wire_dtype);
  put(segments.places(args.wire, args.wire_dtype), encoded);
  if (kept.defined()) {
    const at::Tensor sent = decode(encoded, args.wire_dtype, compute);
    const double largest = largest_of(compute == at::kDouble ? DType::kFloat64 : DType::kFloat32);
    const at::Tensor lost = values.sub(within(sent.mul(factor.reciprocal()), sent, largest));
    segments.scatter(at::where(sent.isfinite(), lost, kept), &Segment::residual, compute);
  }
}

void unpack(const UnpackArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::ScalarType grad = scalar_type_of(args.grad_dtype);
  const at::ScalarType compute = compute_of(args.grad_dtype);
  const at::Tensor stats = over(args.stats, {kNumStats}, at::kDouble, device);
  if (args.turn.is_first) {
    begin_stats(stats);
  }
  const Segments segments(args.segments, args.num_segments, args.wire_dtype, device);
  if (!segments.empty()) {
    const at::Tensor sum =
        sum_wires(segments, args.wire, args.num_wires, args.stride_bytes, args.wire_dtype, args.multiplier, compute);
    at::Tensor values = sum;
    if (args.bucket_scale != nullptr) {
      values = values.mul(scale_or_one(args.bucket_scale, compute, device).reciprocal());
    }
    if (args.bucket_scale != nullptr || grad != compute) {
      const at::Tensor is_beyond = sum.isfinite().logical_and_(values.to(grad).isfinite().logical_not_());
      stats.select(0, kNumSaturated).add_(segments.without_padding(is_beyond).sum());
      values = within(values, sum, largest_of(args.grad_dtype));
    }
    values = values.to(grad);
    segments.scatter(values, &Segment::data, grad);
    add_to_stats(segments.without_padding(values), stats);
  }
  if (args.turn.is_last && args.bucket_scale != nullptr) {
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
  at::Tensor values =
      sum_wires(segments, args.wire, args.num_wires, args.stride_bytes, args.wire_dtype, args.multiplier, compute);
  const at::Tensor scale = scale_or_one(args.bucket_scale, compute, device).mul(args.residual_share);
  at::Tensor kept;
  if (args.residual != nullptr) {
    kept = over(args.residual, {args.numel}, compute, device);
    values = values.add(kept.mul(scale));
  }
  const at::Tensor encoded = encode(within(values, values, limit_of(args.out_dtype, args.limit)), args.out_dtype);
  put(segments.places(args.out, args.out_dtype), encoded);
  if (kept.defined()) {
    const at::Tensor sent = decode(encoded, args.out_dtype, compute);
    const at::Tensor lost = values.sub(sent).mul(scale.reciprocal());
    kept.copy_(at::where(sent.isfinite(), lost, kept));
  }
}

}  // namespace fastsync::aten
