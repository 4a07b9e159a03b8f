// What travels between the ranks, and who adds it up: one choice, a choice between several by what they were measured
// to take, or another one from some step on.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "passes/wire_format.h"
#include "transport/team.h"

namespace fastsync {

// The gradients' own dtype, 16 bits, or 8 bits in blocks with a scale each.
enum class Wire : int8_t { kNone, kFloat16, kBFloat16, kInt8 };

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

// Who adds up a bucket of so many values.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& team);
// The same where ranks have to, or nodes.
Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members);

// A compression and what whole syncs of so many values took with it: (values, seconds), values rising.
struct Candidate {
  Compression compression;
  std::vector<std::pair<int64_t, double>> times;
};

// Seconds for so many values: linear between what was measured; above it, on the line through the last two; below it,
// as long as the first.
double predict(const Candidate& candidate, int64_t numel);

// The first whose time is within 3 % of the least, for they come from the least lossy to the most.
size_t choose(const std::vector<Candidate>& candidates, int64_t numel);

// Which candidates count from which step on. The first phase begins at step 0.
class Schedule {
 public:
  struct Phase {
    int64_t first_step;
    std::vector<Candidate> candidates;
  };

  explicit Schedule(std::vector<Phase> phases);

  const Compression& at(int64_t step, int64_t numel) const;
  bool is_constant() const { return phases_.size() == 1; }
  // Whether gradients of complex numbers may travel, as the pairs of reals that they are.
  bool is_lossless() const;
  // A line, for check_agreement.
  const std::string& description() const { return description_; }

 private:
  std::vector<Phase> phases_;
  std::string description_;
};

}  // namespace fastsync
