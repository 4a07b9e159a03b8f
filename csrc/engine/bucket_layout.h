// Which gradient lies in which bucket: decided once, on the host, from sizes alone.
#pragma once

#include <cstdint>
#include <vector>

namespace fastsync {

// What decides where a parameter goes. Parameters of different kinds (a dtype on a device) never share a bucket.
struct ParameterSize {
  int64_t bytes;
  int64_t kind;
};

// Where all gradients take more than a bucket, the first one is full with so much, as DDP's is: until it is, the
// network has nothing to do.
constexpr int64_t kFirstBucketBytes = 1 << 20;

// Groups parameters into buckets in the given order (indices into sizes): a bucket takes parameters of one kind until
// it holds cap_bytes or more, the first one that is full possibly less. Buckets come in the order in which their last
// parameters do, so that the one that is ready first is sent first.
std::vector<std::vector<int64_t>> lay_out_buckets(const std::vector<ParameterSize>& sizes,
                                                  const std::vector<int64_t>& order, int64_t cap_bytes);

}  // namespace fastsync
