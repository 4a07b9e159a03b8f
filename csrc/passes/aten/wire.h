// Values to a wire's and back: the arithmetic of wire_format.h in whole tensors.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "passes/aten/memory.h"
#include "passes/pack_unpack.h"

namespace fastsync::aten {

// As they travel. On int8 values are of shape [blocks, kBlockValues], and scales of [blocks, 1]; else those are
// undefined.
struct Encoded {
  at::Tensor values;
  at::Tensor scales;
};

// The vector's values will lie at these places of the wire, which stochastic rounding follows.
Encoded encode(const at::Tensor& values, DType wire, const Rounding& rounding, const std::vector<Range>& places);
at::Tensor decode(const Encoded& encoded, at::ScalarType compute);

// A wire's memory.
class Wire {
 public:
  Wire(const void* memory, DType dtype, c10::Device device) : memory_(memory), dtype_(dtype), device_(device) {}

  Encoded read(const std::vector<Range>& places) const;
  void write(const std::vector<Range>& places, const Encoded& encoded) const;
  void clear(const std::vector<Range>& places) const;

 private:
  using Pieces = std::vector<at::Tensor>;
  std::pair<Pieces, Pieces> pieces(const std::vector<Range>& places) const;

  const void* memory_;
  DType dtype_;
  c10::Device device_;
};

// What of the scaled values is beyond ±limit though its source is finite becomes ±limit, and is added to the count.
at::Tensor within(const at::Tensor& scaled, const at::Tensor& source, double limit, const at::Tensor& count = {});

double largest_of(DType dtype);

}  // namespace fastsync::aten
