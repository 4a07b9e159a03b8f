// What travels between the ranks, and who adds it up: for all buckets, or by their size.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "passes/wire_format.h"
#include "transport/team.h"

namespace fastsync {

// The gradients' own dtype, 16 bits, or 8 or 4 bits in blocks with a scale each.
enum class Wire : int8_t { kNone, kFloat16, kBFloat16, kInt8, kInt4 };

// kAllReduce: the process group adds, in the wire's dtype. The others add here, in float32 (float64 for float64
// gradients). kOneShot: every rank gets every rank's values. kTwoShot: rank j gets everybody's shard j, adds, and hands
// the sums out. kTwoLevel: first inside a node, then between nodes; it follows from ranks_per_node and has no name.
enum class Algorithm : int8_t { kAllReduce, kOneShot, kTwoShot, kTwoLevel };

struct Compression {
  Wire wire = Wire::kNone;
  bool sums_in_float32 = false;
  bool error_feedback = false;
  std::optional<Algorithm> algorithm;  // none: by size and number of ranks
  int64_t ranks_per_node = 1;          // above 1 they divide the number of ranks, and are less
};

// Both throw c10::ValueError for names that are none.
Wire wire_from_name(const std::string& name);
Algorithm algorithm_from_name(const std::string& name);
std::string describe(const Compression& compression);

// The dtype that gradients of a dtype travel in.
DType wire_dtype(Wire wire, DType grad);
// Whether neighbours share a scale, so that each gradient begins a block.
inline bool is_of_blocks(Wire wire) { return wire == Wire::kInt8 || wire == Wire::kInt4; }

// Who adds up a bucket of so many values.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& team);
// The same where ranks have to, or nodes.
Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members);

// What buckets travel with.
class CompressionTable {
 public:
  // Those of up to so many values with this, if no row before says otherwise. The last row is for all that are larger.
  using Row = std::pair<int64_t, Compression>;

  explicit CompressionTable(std::vector<Row> rows);

  const Compression& at(int64_t numel) const;
  // Whether gradients of complex numbers may travel, as the pairs of reals that they are.
  bool is_lossless() const;
  // A line, for check_agreement.
  const std::string& description() const { return description_; }

 private:
  std::vector<Row> rows_;
  std::string description_;
};

}  // namespace fastsync
