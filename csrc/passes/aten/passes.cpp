#include "passes/aten/passes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "passes/aten/memory.h"
#include "passes/aten/wire.h"

namespace fastsync::aten {

namespace {

at::ScalarType compute_of(DType grad) { return compute_dtype(scalar_type_of(grad)); }

// One element; a number where there is none.
at::Tensor scale_or_one(const float* bucket_scale, at::ScalarType compute, c10::Device device) {
  return bucket_scale == nullptr ? number(1.0, compute) : over(bucket_scale, 1, at::kFloat, device).to(compute);
}

// As limit_on for the type of the wire.
double limit_of(DType wire, double limit) {
  dispatch(wire, [&](auto w) { limit = limit_on<decltype(w), double>(limit); });
  return limit;
}

// The sum over the wires of their values there, each times the multiplier. May be the wire itself.
at::Tensor sum_wires(const void* first, int64_t num_wires, int64_t stride_bytes, DType dtype, double multiplier,
                     const std::vector<Range>& places, at::ScalarType compute, c10::Device device) {
  at::Tensor sum;
  for (int64_t r = 0; r < num_wires; ++r) {
    at::Tensor values =
        decode(Wire(static_cast<const char*>(first) + r * stride_bytes, dtype, device).read(places), compute);
    if (multiplier != 1.0) {
      values = values.mul(number(multiplier, compute));
    }
    sum = sum.defined() ? sum.add(values) : values;
  }
  return sum;
}

// What is zeros behind the segments.
std::vector<Range> gaps_of(const PackArgs& args) {
  std::vector<Range> gaps;
  for (int64_t i = 0; i < args.num_segments; ++i) {
    const Segment& segment = args.segments[i];
    if (const int64_t gap = gap_behind(segment, args.alignment); segment.numel > 0 && gap > 0) {
      gaps.emplace_back(segment.offset + segment.numel, gap);
    }
  }
  return gaps;
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

// As fastsync::move_on.
void move_on(float* bucket_scale, int64_t* step, const at::Tensor& stats, double scale_share, c10::Device device) {
  if (bucket_scale != nullptr) {
    const at::Tensor scale = over(bucket_scale, 1, at::kFloat, device);
    const at::Tensor largest = stats.narrow(0, kMaxMagnitude, 1).mul(scale_share);
    const at::Tensor exponent = std::get<1>(at::frexp(scale)).sub(1);
    const at::Tensor risen = exponent.add(1);
    const at::Tensor idle = at::maximum(exponent, risen.clamp_max(kMaxIdleScaleExponent));
    const at::Tensor next = at::where(largest.gt(0), at::minimum(scale_exponent_for(largest), risen), idle);
    scale.copy_(power_of_two(next));
  }
  if (step != nullptr) {
    over(step, 1, at::kLong, device).add_(1);
  }
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
  const at::Tensor num_saturated = over(args.stats + kNumSaturated, 1, at::kDouble, device);
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
    weight = over(args.weight, 1, at::kDouble, device).to(compute);
    values = at::where(weight.eq(0), 0.0, values);
  }
  at::Tensor factor = number(args.multiplier, compute).mul(scale_or_one(args.bucket_scale, compute, device));
  at::Tensor kept;
  if (segments.any(&Segment::residual)) {
    values = weight.defined() ? values.mul(weight) : values;
    kept = segments.gather(&Segment::residual, compute, /*filler=*/-0.0);  // which leaves a zero's sign as it is
    values = values.add(kept);
  } else if (weight.defined()) {
    factor = factor.mul(weight);
  }
  const at::Tensor scaled = within(values.mul(factor), values, limit_of(args.wire_dtype, args.limit), num_saturated);
  const auto places = segments.ranges();
  const Wire wire(args.wire, args.wire_dtype, device);
  const Encoded encoded = encode(scaled, args.wire_dtype, args.rounding, places);
  wire.write(places, encoded);
  if (args.wire_dtype != DType::kInt8) {  // on which a segment's padding is written with it
    wire.clear(gaps_of(args));
  }
  if (kept.defined()) {
    const at::Tensor sent = decode(encoded, compute);
    const double largest = largest_of(compute == at::kDouble ? DType::kFloat64 : DType::kFloat32);
    const at::Tensor lost = values.sub(within(sent.mul(factor.reciprocal()), sent, largest));
    segments.scatter(at::where(sent.isfinite(), lost, kept), &Segment::residual, compute);
  }
}

void unpack(const UnpackArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::ScalarType grad = scalar_type_of(args.grad_dtype);
  const at::ScalarType compute = compute_of(args.grad_dtype);
  const at::Tensor stats = over(args.stats, kNumStats, at::kDouble, device);
  if (args.turn.is_first) {
    begin_stats(stats);
  }
  const Segments segments(args.segments, args.num_segments, args.wire_dtype, device);
  if (!segments.empty()) {
    const at::Tensor sum = sum_wires(args.wire, args.num_wires, args.stride_bytes, args.wire_dtype, args.multiplier,
                                     segments.ranges(), compute, device);
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
  if (args.turn.is_last) {
    move_on(args.bucket_scale, args.step, stats, args.scale_share, device);
  }
}

void measure(const MeasureArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const at::Tensor stats = over(args.stats, kNumStats, at::kDouble, device);
  begin_stats(stats);
  const Segments segments(args.segments, args.num_segments, args.grad_dtype, device);
  if (!segments.empty()) {
    add_to_stats(segments.gather(&Segment::data, scalar_type_of(args.grad_dtype)), stats);
  }
}

void reduce(const ReduceArgs& args, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (args.numel == 0) {
    return;
  }
  const at::ScalarType compute = compute_of(args.grad_dtype);
  const std::vector<Range> all{{0, args.numel}};
  at::Tensor values =
      sum_wires(args.wire, args.num_wires, args.stride_bytes, args.wire_dtype, args.multiplier, all, compute, device);
  const at::Tensor scale = scale_or_one(args.bucket_scale, compute, device);
  at::Tensor kept;
  if (args.residual != nullptr) {
    kept = over(args.residual, args.numel, compute, device);
    values = values.add(kept.mul(scale));
  }
  const Encoded encoded =
      encode(within(values, values, limit_of(args.out_dtype, args.limit)), args.out_dtype, args.rounding, all);
  Wire(args.out, args.out_dtype, device).write(all, encoded);
  if (kept.defined()) {
    const at::Tensor sent = decode(encoded, compute);
    const at::Tensor lost = values.sub(sent).mul(scale.reciprocal());
    kept.copy_(at::where(sent.isfinite(), lost, kept));
  }
}

}  // namespace fastsync::aten
