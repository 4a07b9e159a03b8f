// A tally counts the statistics of the CPU's passes.
#pragma once

#include <algorithm>

#include "passes/pack_unpack.h"

namespace fastsync::cpu {

// The loops take values in spans of this length. It is a multiple of kBlockValues.
constexpr int64_t kSpan = 256;
// Value i of a span belongs to column i % kNumColumns. Sums of squares are kept by column.
constexpr int kNumColumns = 16;

// The squares of a span, added up by column in float, and its largest magnitude, which is nan if a value is.
struct SpanSquares {
  float columns[kNumColumns];
  float largest;
};

// Statistics of gradients. The squares have one sum per column, in double, so that the result depends neither on the
// number of threads nor on the instruction set. A span adds its sums in float if these are safe, and else value by
// value.
struct Tally {
  double columns[kNumColumns] = {};
  double largest = 0.0;
  int64_t num_nonfinite = 0;
  int64_t num_saturated = 0;

  template <class G>
  void add_values(const G* gradient, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      const auto value = static_cast<double>(decode(gradient[i]));
      columns[i % kNumColumns] += value * value;
      if (is_finite(value)) {
        largest = std::max(largest, magnitude(value));
      } else {
        num_nonfinite += 1;
      }
    }
  }

  template <class G>
  void add_span(const SpanSquares& squares, const G* gradient, int64_t numel) {
    if (squares.largest == 0.0F) {
      return;
    }
    if (!has_safe_squares(squares.largest)) {
      add_values(gradient, numel);
      return;
    }
    for (int j = 0; j < kNumColumns; ++j) {
      columns[j] += static_cast<double>(squares.columns[j]);
    }
    largest = std::max(largest, static_cast<double>(squares.largest));
  }

  void add(const Tally& other) {
    for (int j = 0; j < kNumColumns; ++j) {
      columns[j] += other.columns[j];
    }
    largest = std::max(largest, other.largest);
    num_nonfinite += other.num_nonfinite;
    num_saturated += other.num_saturated;
  }

  void write_to(double* stats, bool is_first) const {
    double sum = 0.0;
    for (const double column : columns) {
      sum += column;
    }
    add_to_stats(stats, is_first, sum, num_nonfinite, num_saturated, largest);
  }
};

}  // namespace fastsync::cpu
