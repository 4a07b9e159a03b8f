// The statistics that the CPU's passes take.
#pragma once

#include <algorithm>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync::cpu {

constexpr int kRow = 16;
constexpr int64_t kBlock = 256;

// Squares of a block, summed per column in float, and its largest magnitude as bits (ordered like the magnitudes, inf
// and nan above all).
struct BlockSquares {
  float columns[kRow];
  uint32_t largest_bits;
};

// The sum of squares in double, one sum per column, so that the result depends neither on the number of threads nor on
// the instruction set. Blocks whose squares are safe in float come in summed; the others value by value.
struct Tally {
  double columns[kRow] = {};
  double largest = 0.0;
  int64_t num_nonfinite = 0;
  int64_t num_saturated = 0;

  template <class C>
  void add_value(C value, int column) {
    const auto wide = static_cast<double>(value);
    columns[column] += wide * wide;
    if (is_finite(value)) {
      largest = std::max(largest, magnitude(wide));
    } else {
      num_nonfinite += 1;
    }
  }

  template <class G>
  void add_values(const G* gradient, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      add_value(decode(gradient[i]), static_cast<int>(i % kRow));
    }
  }

  template <class G>
  void add_block(const BlockSquares& squares, const G* gradient, int64_t numel) {
    if (squares.largest_bits == 0) {
      return;
    }
    if (!has_safe_squares(float_from_bits(squares.largest_bits))) {
      add_values(gradient, numel);
      return;
    }
    for (int j = 0; j < kRow; ++j) {
      columns[j] += static_cast<double>(squares.columns[j]);
    }
    largest = std::max(largest, static_cast<double>(float_from_bits(squares.largest_bits)));
  }

  void add(const Tally& other) {
    for (int j = 0; j < kRow; ++j) {
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

inline Tally total_of(const std::vector<Tally>& tallies) {
  Tally total;
  for (const Tally& tally : tallies) {
    total.add(tally);
  }
  return total;
}

}  // namespace fastsync::cpu
