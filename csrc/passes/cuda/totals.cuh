// What the kernels add up, and what all of them read.
#pragma once

#include <type_traits>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

// No constructors: the totals also live in shared memory, which has none. Total{} is zero.
struct Saturations {
  using Batch = Saturations;
  int64_t count;

  __device__ void add(const Saturations& other) { count += other.count; }

  template <class T>
  __device__ void add_values(const T* /*written*/, int /*count*/) {}  // what saturated does not show in what is written

  __device__ void add_to(double* stats, bool is_first) const {
    stats[kNumSaturated] = (is_first ? 0.0 : stats[kNumSaturated]) + static_cast<double>(count);
  }
};

// Of at most 32 values that a thread has at once: added up in float, for a conversion to double costs more than all
// else. Where that is not safe, the values have to be gone through again.
struct FloatSquares {
  float sum;
  float largest;  // a nan shows in the sum alone
  int num_saturated;

  __device__ void add_value(float value) {
    sum = fmaf(value, value, sum);
    largest = max(largest, magnitude(value));
  }

  __device__ void add(const FloatSquares& other) {
    sum += other.sum;
    largest = max(largest, other.largest);
    num_saturated += other.num_saturated;
  }

  __device__ bool is_safe() const {
    return (has_safe_squares(largest) && sum == sum) || (largest == 0.0F && sum == 0.0F);
  }
};

template <class C>
struct Squares {
  using Batch = std::conditional_t<std::is_same_v<C, double>, Squares, FloatSquares>;
  double sum;
  int64_t num_nonfinite;
  int64_t num_saturated;
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

  template <class G>
  __device__ void add_values(const G* values, int count) {
    for (int i = 0; i < count; ++i) {
      add_value(decode(values[i]));
    }
  }

  __device__ void add(const FloatSquares& batch) {
    sum += static_cast<double>(batch.sum);
    largest = max(largest, batch.largest);
    num_saturated += batch.num_saturated;
  }

  __device__ void add(const Squares& other) {
    sum += other.sum;
    num_nonfinite += other.num_nonfinite;
    num_saturated += other.num_saturated;
    largest = max(largest, other.largest);
  }

  __device__ void add_to(double* stats, bool is_first) const {
    stats[kSumOfSquares] = (is_first ? 0.0 : stats[kSumOfSquares]) + sum;
    stats[kNumNonfinite] = (is_first ? 0.0 : stats[kNumNonfinite]) + static_cast<double>(num_nonfinite);
    stats[kMaxMagnitude] = max(is_first ? 0.0 : stats[kMaxMagnitude], static_cast<double>(largest));
    if (num_saturated > 0) {  // to what packing has counted
      stats[kNumSaturated] += static_cast<double>(num_saturated);
    }
  }
};

// A batch to a thread's total. again(total) adds its values one by one.
template <class Total, class Again>
__device__ void add_batch(const typename Total::Batch& batch, Total& total, const Again& again) {
  if constexpr (!std::is_same_v<typename Total::Batch, Total>) {
    if (!batch.is_safe()) {
      total.num_saturated += batch.num_saturated;  // which what was written does not show
      return again(total);
    }
  }
  total.add(batch);
}

// Behind a segment's last value, whose chunk the block has: zeros up to the next multiple of the alignment.
template <class W>
__device__ void fill_gap(W* wire, const Segment& segment, int64_t alignment) {
  if (static_cast<int64_t>(threadIdx.x) < gap_behind(segment, alignment)) {
    wire[segment.offset + segment.numel + threadIdx.x] = W{};
  }
}
// The rest of an int8 block is zeros already.
__device__ inline void fill_gap(Int8Block* /*wire*/, const Segment& /*segment*/, int64_t /*alignment*/) {}

// A pointer is chosen, not a value: a branch would make the compiler write every loop twice.
__device__ const float kUnitScale = 1.0F;
__device__ inline const float* scale_or_unit(const float* bucket_scale) {
  return bucket_scale != nullptr ? bucket_scale : &kUnitScale;
}
__device__ const double kUnitWeight = 1.0;
__device__ inline const double* weight_or_unit(const double* weight) {
  return weight != nullptr ? weight : &kUnitWeight;
}

}  // namespace fastsync::cuda
