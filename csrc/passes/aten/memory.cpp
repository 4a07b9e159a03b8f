#include "passes/aten/memory.h"

#include <algorithm>
#include <iterator>

namespace fastsync::aten {

at::Tensor over(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                c10::Device device) {
  return at::for_blob(const_cast<void*>(data), sizes)
      .strides(strides)
      .options(at::TensorOptions().dtype(dtype).device(device))
      .target_device(device)
      .make_tensor();
}

at::Tensor joined(const std::vector<at::Tensor>& pieces) {
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces);
}

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

Segments::Segments(const Segment* segments, int64_t num_segments, DType wire, c10::Device device)
    : unit_(unit_of(wire).values), device_(device) {
  std::copy_if(segments, segments + num_segments, std::back_inserter(segments_),
               [](const Segment& segment) { return segment.numel > 0; });
}

std::vector<Range> Segments::ranges() const {
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

std::vector<at::Tensor> Segments::split(const at::Tensor& values) const {
  std::vector<at::Tensor> pieces;
  int64_t begin = 0;
  for (const Segment& segment : segments_) {
    pieces.push_back(values.narrow(0, begin, segment.numel));
    begin += padded(segment.numel);
  }
  return pieces;
}

void Segments::scatter(const at::Tensor& values, void* Segment::* field, at::ScalarType dtype) const {
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

at::Tensor Segments::without_padding(const at::Tensor& values) const {
  const bool is_padded = std::any_of(segments_.begin(), segments_.end(),
                                     [&](const Segment& each) { return padded(each.numel) != each.numel; });
  return is_padded ? at::cat(split(values)) : values;
}

}  // namespace fastsync::aten
