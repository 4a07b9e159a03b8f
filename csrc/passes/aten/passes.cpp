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
at::Tensor over(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                c10::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}
at::Tensor over(const void* data, int64_t numel, at::ScalarType dtype, c10::Device device) {
  return over(data, {numel}, {1}, dtype, device);
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

// Values of a wire: the first, and how many.
using Range = std::pair<int64_t, int64_t>;

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

  // Where on the wire they are, neighbours as one range.
  std::vector<Range> ranges() const {
    std::vector<Range> ranges;
    for (const Segment& segment : segments_) {
      if (!ranges.empty() && ranges.back().first + ranges.back().second == segment.offset) {
        ranges.back().second += padded(segment.numel);
      } else {
        ranges.emplace_back(segment.offset, padded(segment.numel));
      }
    }
    return ranges;
  }

  // For what does not have the field, the filler.
  at::Tensor gather(void* Segment::* field, at::ScalarType dtype, double filler = 0.0) const {
    const auto options = at::TensorOptions().dtype(dtype).device(device_);
    std::vector<at::Tensor> pieces;
    for (const Segment& segment : segments_) {
      pieces.push_back(segment.*field == nullptr ? at::full({segment.numel}, filler, options)
                                                 : over(segment.*field, segment.numel, dtype, device_));
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
        to.push_back(over(segments_[i].*field, segments_[i].numel, dtype, device_));
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

// As they travel. Of blocks, values are of shape [blocks, values], and scales of [blocks, 1]; else those are undefined.
struct Encoded {
  at::Tensor values;
  at::Tensor scales;
};

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

// As encode_block of the other backends: float32 [blocks, kBlockValues].
Encoded encode_blocks(const at::Tensor& values, const Rounding& rounding, const std::vector<Range>& places) {
  // On the device: CUDA would multiply with the inverse of a number that is on the host.
  const at::Tensor largest_int8 = at::full({1}, kLargestInt8, values.options());
  const at::Tensor amax = values.abs().amax(
      /*dim=*/1, /*keepdim=*/true);  // nan where one of them is
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

// The vector's values will lie at these places of the wire, which stochastic rounding follows.
Encoded encode(const at::Tensor& values, DType wire, const Rounding& rounding, const std::vector<Range>& places) {
  if (wire == DType::kInt8) {
    return encode_blocks(values.to(at::kFloat).view({-1, kBlockValues}), rounding, places);
  }
  return {(wire == DType::kFloat64 ? values : values.to(at::kFloat)).to(scalar_type_of(wire)), {}};
}

at::Tensor decode(const Encoded& encoded, at::ScalarType compute) {
  const auto& [values, scales] = encoded;
  return scales.defined() ? values.to(at::kFloat).mul(scales).view(-1).to(compute) : values.to(compute);
}

// A wire's memory.
class Wire {
 public:
  Wire(const void* memory, DType dtype, c10::Device device) : memory_(memory), dtype_(dtype), device_(device) {}

  Encoded read(const std::vector<Range>& places) const {
    const auto [values, scales] = pieces(places);
    return {joined(values), scales.empty() ? at::Tensor() : joined(scales)};
  }

  void write(const std::vector<Range>& places, const Encoded& encoded) const {
    const auto [values, scales] = pieces(places);
    put(values, encoded.values);
    if (!scales.empty()) {
      put(scales, encoded.scales);
    }
  }

  void clear(const std::vector<Range>& places) const {
    if (!places.empty()) {
      at::_foreach_zero_(pieces(places).first);
    }
  }

 private:
  // Its values, and its scales where it is of blocks.
  using Pieces = std::vector<at::Tensor>;
  std::pair<Pieces, Pieces> pieces(const std::vector<Range>& places) const {
    Pieces values, scales;
    for (const auto& [first, numel] : places) {
      if (dtype_ != DType::kInt8) {
        const char* const begin = static_cast<const char*>(memory_) + first * unit_of(dtype_).bytes;
        values.push_back(over(begin, numel, scalar_type_of(dtype_), device_));
        continue;
      }
      constexpr auto kBytes = static_cast<int64_t>(sizeof(Int8Block));
      constexpr auto kFloats = kBytes / static_cast<int64_t>(sizeof(float));
      const auto* const block = unit_at<Int8Block>(memory_, first);
      const int64_t num_blocks = numel / kBlockValues;
      values.push_back(over(block->values, {num_blocks, kBlockValues}, {kBytes, 1}, at::kChar, device_));
      scales.push_back(over(&block->scale, {num_blocks, 1}, {kFloats, 1}, at::kFloat, device_));
    }
    return {values, scales};
  }

  const void* memory_;
  DType dtype_;
  c10::Device device_;
};

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
  return bucket_scale == nullptr ? number(1.0, compute) : over(bucket_scale, 1, at::kFloat, device).to(compute);
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
    kept = segments.gather(&Segment::residual, compute,
                           /*filler=*/-0.0);  // which leaves a zero's sign as it is
    values = values.add(kept);
  } else if (weight.defined()) {
    factor = factor.mul(weight);
  }
  const at::Tensor scaled = within(values.mul(factor), values, limit_of(args.wire_dtype, args.limit), num_saturated);
  const auto places = segments.ranges();
  const Wire wire(args.wire, args.wire_dtype, device);
  const Encoded encoded = encode(scaled, args.wire_dtype, args.rounding, places);
  wire.write(places, encoded);
  if (unit_of(args.wire_dtype).values == 1) {  // else a segment's padding is written with it
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
