// What the kernels add up, and what all of them read.
#pragma once

#include "../pack_unpack.h"

namespace fastsync::cuda {

// No constructors: the totals also live in shared memory, which has none. Total{} is zero.
struct Saturations {
  int64_t count;

  __device__ void add(const Saturations& other) { count += other.count; }

  __device__ void add_to(double* stats, bool is_first) const {
    stats[kNumSaturated] = (is_first ? 0.0 : stats[kNumSaturated]) + static_cast<double>(count);
  }
};

template <class C>
struct Squares {
  double sum;
  int64_t num_nonfinite;
  C largest;

  __device__ void add_value(C value) {
    const auto wide = static_cast<double>(value);
    sum = fma(wide, wide, sum);
    if (is_finite(value)) {
      largest = max(largest, magnitude(value));
    } else {
      num_nonfinite += 1;
    }
  }

  __device__ void add(const Squares& other) {
    sum += other.sum;
    num_nonfinite += other.num_nonfinite;
    largest = max(largest, other.largest);
  }

  __device__ void add_to(double* stats, bool is_first) const {
    stats[kSumOfSquares] = (is_first ? 0.0 : stats[kSumOfSquares]) + sum;
    stats[kNumNonfinite] = (is_first ? 0.0 : stats[kNumNonfinite]) + static_cast<double>(num_nonfinite);
    stats[kMaxMagnitude] = max(is_first ? 0.0 : stats[kMaxMagnitude], static_cast<double>(largest));
  }
};

// A pointer is chosen, not a value: a branch would make the compiler write every loop twice.
__device__ const float kUnitScale = 1.0F;
__device__ inline const float* scale_or_unit(const float* bucket_scale) {
  return bucket_scale != nullptr ? bucket_scale : &kUnitScale;
}

// Moves a bucket's scale on for the next step after the last of a bucket's calls.
__device__ inline void move_on(float* bucket_scale, const double* stats, bool is_last) {
  if (is_last && bucket_scale != nullptr) {
    *bucket_scale = next_bucket_scale(*bucket_scale, stats[kMaxMagnitude]);
  }
}

}  // namespace fastsync::cuda
