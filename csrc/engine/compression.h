// A compression tells in what dtype gradients travel between the ranks, and how they are added up.
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
  std::optional<DType> wire;  // the gradients' own dtype if unset
  bool sums_in_float32 = false;
  bool error_feedback = false;
  std::optional<Algorithm> algorithm;  // chosen by size and number of ranks if unset
  int64_t ranks_per_node = 1;          // above 1, plans have two levels; a smaller divisor of the number of ranks
  int64_t low_rank = 0;                // above 0, the rank of the products that matrices travel as, see LowRankSum

  bool operator==(const Compression& other) const = default;

  // The dtype that gradients of this dtype travel in.
  DType wire_dtype(DType grad) const { return wire.value_or(grad); }
};

// Returns the algorithm that adds up a bucket of so many values. Ranks that share memory never leave the sum to the
// process group, nor do they with ranks_add.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& ranks, bool share_memory,
                        bool ranks_add);
// Returns one of the algorithms by which the members, which are ranks or nodes, add in float32 themselves.
Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members);

// Tells the compression of a bucket by its size.
struct CompressionTable {
  // A row holds for buckets of up to so many values that no row before it holds for. The last row is for all others.
  std::vector<std::pair<int64_t, Compression>> rows;  // at least one
  std::string description;                            // a line that the ranks have to agree on

  const Compression& at(int64_t numel) const;
  // Whether gradients of complex numbers may travel, as the pairs of reals that they are.
  bool is_lossless() const;
  // A line that the ranks have to agree on with lowrank, else empty. Each rank makes the same factors orthonormal by
  // itself, and multiplies them. So all have to use the same instructions, libraries and number of threads.
  std::string arithmetic(c10::Device device) const;
};

}  // namespace fastsync
