#include "sums/flat_gradients.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace fastsync {

namespace {

// Returns the parts of the segments that lie in the ranges. They have the ranges' offsets on the wire.
std::vector<Segment> cut(const std::vector<Segment>& segments, const std::vector<Range>& ranges, DType grad_dtype) {
  const int64_t grad_size = unit_of(grad_dtype).bytes;
  const int64_t residual_size = grad_dtype == DType::kFloat64 ? 8 : 4;
  std::vector<Segment> parts;
  for (const Range& range : ranges) {
    auto segment = std::upper_bound(segments.begin(), segments.end(), range.begin,
                                    [](int64_t value, const Segment& other) { return value < other.offset; });
    if (segment != segments.begin()) {
      --segment;
    }
    for (; segment != segments.end() && segment->offset < range.end; ++segment) {
      const int64_t first = std::max(range.begin, segment->offset);
      const int64_t numel = std::min(range.end, segment->offset + segment->numel) - first;
      if (numel > 0) {
        const int64_t skipped = first - segment->offset;
        parts.push_back({advance(segment->data, skipped * grad_size), numel, range.offset + first - range.begin,
                         segment->operand ? advance(segment->operand, skipped * residual_size) : nullptr});
      }
    }
  }
  return parts;
}

}  // namespace

int64_t bytes_of(int64_t values, DType dtype) {
  const WireUnit unit = unit_of(dtype);
  return values / unit.values * unit.bytes;
}

int64_t values_in(int64_t bytes, DType dtype) {
  const WireUnit unit = unit_of(dtype);
  return bytes / unit.bytes * unit.values;
}

FlatGradients::FlatGradients(std::vector<at::Tensor> of, DType wire, c10::Device where, int64_t least_alignment)
    : device(where),
      grads(std::move(of)),
      grad_dtype(dtype_of(grads.front().scalar_type())),
      wire_dtype(wire),
      alignment(std::max(least_alignment, alignment_of(wire, grads.size()))),
      segments(lay_out(grads, wire, {}, alignment)),
      num_values(wire_length(segments, alignment)),
      limit(saturation_limit(wire, /*world_size=*/1)) {}

FlatGradients::FlatGradients(const at::Tensor& bytes)
    : device(bytes.device()),
      grads{bytes},
      grad_dtype(DType::kBytes),
      wire_dtype(DType::kBytes),
      alignment(1),
      segments{{bytes.data_ptr(), bytes.numel(), /*offset=*/0}},
      num_values(bytes.numel()),
      limit(saturation_limit(wire_dtype, /*world_size=*/1)) {}

void FlatGradients::unpack_to_nowhere() {
  for (size_t i = 0; i < segments.size(); ++i) {
    segments[i].data = nowhere.emplace_back(at::empty_like(grads[i])).data_ptr();
  }
}

void FlatGradients::pack(const std::vector<Range>& ranges, DType dtype, void* wire, Position position) const {
  RECORD_FUNCTION("fastsync::pack", {});
  const std::vector<Segment> from = cut(segments, ranges, grad_dtype);
  if (dtype == DType::kBytes) {
    copy_bytes(from, wire, /*to_wire=*/true);
    return;
  }
  run_pack(pack_args(from, dtype, wire, position, /*gap_alignment=*/1), device, *workspace);
}

void FlatGradients::pack_all(void* wire) const {
  RECORD_FUNCTION("fastsync::pack", {});
  run_pack(pack_args(segments, wire_dtype, wire, Position(), alignment), device, *workspace);
}

PackArgs FlatGradients::pack_args(const std::vector<Segment>& from, DType dtype, void* wire, Position position,
                                  int64_t gap_alignment) const {
  return {.segments = from.data(),
          .num_segments = static_cast<int64_t>(from.size()),
          .grad_dtype = grad_dtype,
          .wire_dtype = dtype,
          .wire = wire,
          .multiplier = multiplier,
          .limit = limit,
          .bucket_scale = data_or_null(scale),
          .stats = stats.data_ptr<double>(),
          .position = position,
          .weight = weight.defined() ? weight.const_data_ptr<double>() : nullptr,
          .gap_alignment = gap_alignment,
          .residual_shift = residual_shift};
}

void FlatGradients::unpack(const std::vector<Range>& ranges, const void* wire, int64_t num_wires, int64_t stride,
                           double factor, Position position) const {
  RECORD_FUNCTION("fastsync::unpack", {});
  std::vector<Segment> to = output.defined()
                                ? cut({{output.data_ptr(), output.numel(), /*offset=*/0}}, ranges, grad_dtype)
                                : cut(segments, ranges, grad_dtype);
  if (wire_dtype == DType::kBytes) {
    copy_bytes(to, wire, /*to_wire=*/false);
    return;
  }
  for (Segment& segment : to) {
    segment.operand = nullptr;
  }
  unpack_to(to, wire, num_wires, stride, factor, position, /*own_wire=*/-1);
}

void FlatGradients::unpack_to(const std::vector<Segment>& to, const void* wire, int64_t num_wires, int64_t stride,
                              double factor, Position position, int64_t own_wire) const {
  run_unpack({to.data(), static_cast<int64_t>(to.size()), grad_dtype, wire_dtype, wire, data_or_null(scale),
              stats.data_ptr<double>(), num_counted(num_wires), stride, factor, position, 1.0 / mean_factor,
              /*by_tree=*/most_in_tree > 0 && num_wires > 1, own_wire},
             device, *workspace);
}

bool FlatGradients::can_stay() const {
  const bool is_exact = wire_dtype == grad_dtype && (wire_dtype == DType::kFloat32 || wire_dtype == DType::kFloat64);
  return is_exact && multiplier == 1.0 && output.defined() && !scale.defined() && !weight.defined() &&
         !residual.defined() && takes_own_wire(device);
}

void FlatGradients::unpack_with_own(const Range& range, const OwnValues& own, const void* wire, int64_t num_wires,
                                    int64_t stride, double factor, Position position) const {
  RECORD_FUNCTION("fastsync::unpack", {});
  const int64_t size = unit_of(grad_dtype).bytes;
  std::vector<Segment> from = segments;  // which may have been pointed to nowhere
  for (size_t i = 0; i < from.size(); ++i) {
    from[i].data = grads[i].data_ptr();
  }
  std::vector<Segment> to = cut(from, {{own.range.begin, own.range.end, range.offset}}, grad_dtype);
  for (Segment& segment : to) {
    segment.operand = segment.data;
    segment.data = advance(output.data_ptr(), (range.begin + segment.offset - range.offset) * size);
  }
  unpack_to(to, wire, num_wires, stride, factor, position, own.wire);
}

// The memory of the first gradient stands for the wire's, and all others lie before or behind it.
void FlatGradients::multiply(const at::Tensor& factors) const {
  RECORD_FUNCTION("fastsync::unpack", {});
  std::vector<Segment> all = segments;
  const auto* const wire = static_cast<const std::byte*>(all.front().data);
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].offset = values_in(static_cast<const std::byte*>(all[i].data) - wire, grad_dtype);
    all[i].operand = factors.defined() ? factors.data_ptr<double>() + i : nullptr;
  }
  run_unpack({all.data(), static_cast<int64_t>(all.size()), grad_dtype, grad_dtype, wire, /*bucket_scale=*/nullptr,
              stats.data_ptr<double>()},
             device, *workspace);
}

void FlatGradients::copy_bytes(const std::vector<Segment>& of, const void* wire, bool to_wire) const {
  for (const Segment& segment : of) {
    const auto bytes_at = [&](const void* begin) {
      return at::for_blob(const_cast<void*>(begin), {segment.numel})
          .options(at::TensorOptions().dtype(at::kByte).device(device))
          .target_device(device)
          .make_tensor();
    };
    const at::Tensor own = bytes_at(segment.data);
    const at::Tensor travelling = bytes_at(advance(wire, segment.offset));
    to_wire ? travelling.copy_(own) : own.copy_(travelling);
  }
}

ReduceArgs FlatGradients::reduce_args(const void* rows, DType dtype, int64_t num_rows, int64_t stride, int64_t numel,
                                      void* out, double factor) const {
  return {.wire = rows,
          .num_wires = num_counted(num_rows),
          .stride_bytes = stride,
          .numel = numel,
          .grad_dtype = grad_dtype,
          .wire_dtype = dtype,
          .out = out,
          .out_dtype = wire_dtype,
          .multiplier = factor,
          .limit = limit,
          .bucket_scale = data_or_null(scale),
          .residual = nullptr,
          .by_tree = most_in_tree > 0};
}

}  // namespace fastsync
