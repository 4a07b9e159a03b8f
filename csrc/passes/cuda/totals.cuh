// Kernels add up these totals over their values.
#pragma once

#include <type_traits>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

struct Nothing {
  using Batch = Nothing;
  __device__ void add(const Nothing& /*other*/) {}
};

// Totals also lie in shared memory, where no constructor runs. So they have none, and Total{} is zero.
struct Saturations {
  using Batch = Saturations;
  unsigned count;  // the values of one block are far fewer than 2^32

  __device__ void add(const Saturations& other) { count += other.count; }
};

// Adds up the squares of at most 32 values that a thread has at once. It adds in float, because converting to double
// costs more than all else. If that is not safe, add_batch adds the values again in double.
struct FloatSquares {
  float sum;
  float largest;  // a nan shows only in the sum
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

// The counts of one block fit into 32 bits, and those of a launch into int64_t.
template <class C, class Count = unsigned>
struct Squares {
  using Batch = std::conditional_t<std::is_same_v<C, double>, Squares, FloatSquares>;
  using OfLaunch = Squares<C, int64_t>;
  double sum;
  Count num_nonfinite;
  Count num_saturated;
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

  template <class OtherCount>
  __device__ void add(const Squares<C, OtherCount>& other) {
    sum += other.sum;
    num_nonfinite += other.num_nonfinite;
    num_saturated += other.num_saturated;
    largest = max(largest, other.largest);
  }

  __device__ void add_to(double* stats, bool is_first) const {
    add_to_stats(stats, is_first, sum, num_nonfinite, num_saturated, static_cast<double>(largest));
  }
};

// Adds a batch to a thread's total. again(total) adds the batch's values one by one.
template <class Total, class Again>
__device__ void add_batch(const typename Total::Batch& batch, Total& total, const Again& again) {
  if constexpr (!std::is_same_v<typename Total::Batch, Total>) {
    if (!batch.is_safe()) {
      total.num_saturated += batch.num_saturated;  // the values that were written do not show it
      return again(total);
    }
  }
  total.add(batch);
}

}  // namespace fastsync::cuda
