// The statistics of gradients in an order that depends on the gradients alone. Those that unpacking takes depend on
// buckets, chunks and shards, and so on the number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fastsync {

// Returns the statistics as float64 [kNumStats], on the gradients' device. It goes from gradient to gradient, and adds
// up the squares of each in blocks of a fixed size. The gradients are dense, of supported dtypes and on one device.
// There is at least one.
at::Tensor stats_in_order(const std::vector<at::Tensor>& gradients);

}  // namespace fastsync
