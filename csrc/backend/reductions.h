// Element by element, two or more arrays become one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace fastsync {

// Makes out = a op b of so many bytes. out may be a or b.
using Reduction = void (*)(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes);

// How values of a dtype are reduced over so many ranks. The dtypes and the results are Gloo's: bool counts as uint8,
// and a complex sum is that of real and imaginary parts.
struct Reducing {
  // Throws c10::Error, in which `name` is the collective's, if Gloo would.
  Reducing(const char* name, at::ScalarType dtype, const c10d::ReduceOp& reduce_op, int64_t num_ranks);

  // Divides a sum that is a mean.
  void finish(const at::Tensor& sum) const;

  c10d::ReduceOp::RedOpType op;
  int64_t size;
  at::ScalarType real;           // the dtype of what is reduced
  int64_t number = 0;            // tells it from others
  Reduction function = nullptr;  // AVG's is SUM's
};

}  // namespace fastsync
