// Element by element, two or more arrays become one.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace fastsync {

// Makes out = a op b of so many bytes. out may be a or b.
using Reduction = void (*)(const std::byte* a, const std::byte* b, std::byte* out, int64_t bytes);

// Returns the reduction, or null if there is none for the dtype. The dtypes and the results are Gloo's: bool counts as
// uint8. AVG is SUM here: the caller divides.
Reduction reduction_of(at::ScalarType dtype, c10d::ReduceOp::RedOpType op);

}  // namespace fastsync
