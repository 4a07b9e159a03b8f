// Tensors over the memory that the passes are given as raw pointers: many pieces, gathered into one vector and back.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "passes/backend.h"

namespace fastsync::aten {

// A tensor in somebody else's memory, for as long as that lives.
at::Tensor over(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                c10::Device device);
inline at::Tensor over(const void* data, int64_t numel, at::ScalarType dtype, c10::Device device) {
  return over(data, {numel}, {1}, dtype, device);
}

// One number, which the device need not be told: operators take it beside tensors of any device.
inline at::Tensor number(double value, at::ScalarType dtype) {
  return at::scalar_tensor(value, at::TensorOptions().dtype(dtype));
}

// One after the other, along the first dimension.
at::Tensor joined(const std::vector<at::Tensor>& pieces);

// The other way round: into places that are as long together.
void put(const std::vector<at::Tensor>& places, const at::Tensor& values);

// Values of a wire: the first, and how many.
using Range = std::pair<int64_t, int64_t>;

// The segments that have values, of which one vector holds all, one after the other. On int8 each begins a block, and
// zeros fill up its last one.
class Segments {
 public:
  Segments(const Segment* segments, int64_t num_segments, DType wire, c10::Device device);

  bool empty() const { return segments_.empty(); }

  // Where on the wire they are, neighbours as one range.
  std::vector<Range> ranges() const;

  // For what does not have the field, the filler.
  template <class Field>
  at::Tensor gather(Field Segment::* field, at::ScalarType dtype, double filler = 0.0) const {
    std::vector<at::Tensor> pieces;
    for (const Segment& segment : segments_) {
      pieces.push_back(segment.*field == nullptr
                           ? at::full({segment.numel}, filler, at::TensorOptions().dtype(dtype).device(device_))
                           : over(segment.*field, segment.numel, dtype, device_));
      if (const int64_t numel = padded(segment.numel) - segment.numel; numel > 0) {
        pieces.push_back(at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device_)));
      }
    }
    return joined(pieces);
  }

  template <class Field>
  bool any(Field Segment::* field) const {
    return std::any_of(segments_.begin(), segments_.end(), [&](const Segment& each) { return each.*field != nullptr; });
  }

  // To what has the field.
  void scatter(const at::Tensor& values, void* Segment::* field, at::ScalarType dtype) const;

  // Without what fills up blocks.
  at::Tensor without_padding(const at::Tensor& values) const;

 private:
  int64_t padded(int64_t numel) const { return (numel + unit_ - 1) / unit_ * unit_; }
  std::vector<at::Tensor> split(const at::Tensor& values) const;

  std::vector<Segment> segments_;
  int64_t unit_;
  c10::Device device_;
};

}  // namespace fastsync::aten
