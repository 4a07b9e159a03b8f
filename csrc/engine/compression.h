// What travels between the ranks, and who adds it up: for all buckets, or by their size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sums/plan.h"
#include "transport/team.h"

namespace fastsync {

struct Compression {
  std::optional<DType> wire;  // none: the gradients' own dtype
  bool sums_in_float32 = false;
  bool error_feedback = false;
  std::optional<Algorithm> algorithm;  // none: by size and number of ranks
  int64_t ranks_per_node = 1;          // above 1 they divide the number of ranks, and are less

  bool operator==(const Compression& other) const = default;

  // The dtype that gradients of a dtype travel in.
  DType wire_dtype(DType grad) const { return wire.value_or(grad); }
};

// Who adds up a bucket of so many values, among ranks that share memory or that do not.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& ranks,
                        bool share_memory);
// The same where ranks have to, or nodes.
Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members);

// What buckets travel with.
struct CompressionTable {
  // Buckets of up to so many values travel with this, if no row before says otherwise; the last row is for all others.
  std::vector<std::pair<int64_t, Compression>> rows;  // at least one
  std::string description;                            // a line, for check_agreement

  const Compression& at(int64_t numel) const;
  // Whether gradients of complex numbers may travel, as the pairs of reals that they are.
  bool is_lossless() const;
};

}  // namespace fastsync
