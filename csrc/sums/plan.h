// How one bucket is summed: as data, which BucketSum runs.
//
// Note [Plans]
// ~~~~~~~~~~~~
// A bucket goes in pieces: while one travels, the next is packed, and the one before is added up or unpacked. All
// pieces take the same phases. In a phase a team exchanges rows, of which each member has one for each other member, or
// gathers them, of which each member has one for all. What has come in a phase is added up and becomes the rows of the
// next phase. What has come in the last phase is unpacked.
//
//   one_shot        gather; every rank adds all rows while it unpacks
//   two_shot        exchange, of which rank j adds up everybody's shard j; gather of the means, encoded anew
//   reduce_scatter  the exchange of two_shot alone; what has come is added up into the output
//   two_level       see its builder
//   all_reduce      one phase of one piece, in which the process group adds, in the wire's dtype
//
// Ranks take sums in float32 (float64 for float64 gradients) and in rank order, whatever travels. So there is one
// rounding on the way in, and one for each sum that travels on, however many ranks there are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sums/bucket.h"
#include "transport/team.h"
#include "transport/teams.h"

namespace fastsync {

// Adds up the rows that have come in a phase. They consist of parts, each of which is encoded by itself.
struct Reduce {
  DType dtype;  // of the rows
  int64_t num_rows;
  int64_t num_values;             // of a part
  std::vector<int64_t> outs;      // where each part's sum goes, in bytes
  double share;                   // what each row counts in the sum
  int64_t begin;                  // the first of the bucket's values that these are the sums of
  double residual_share;          // what this rank's residual of a value counts in the sum, as if packing had sent it
  bool adds_side_values = false;  // and sends them on in the next phase
};

struct Phase {
  std::shared_ptr<Team> team;
  int tag;
  bool is_gather;
  int64_t num_rows;  // the first members of the team get rows in an exchange
  Rows to;           // by member; the same as from in a gather
  Rows from;
  bool is_counted = true;  // in the bytes sent
  std::optional<Reduce> reduce = {};

  // Where this rank puts what the member is to get.
  int64_t place_for(int64_t member) const { return (member == team->rank() ? from : to).begin(member); }
  std::unique_ptr<Transfer> expect(const at::Tensor& memory) const;
  // call(rows, first, count) for all rows that this rank fills.
  template <class Call>
  void for_own_rows(const Call& call) const {
    if (is_gather) {
      return call(to, team->rank(), 1);
    }
    call(to, 0, num_rows);  // its own row among them for nothing
    if (team->rank() < num_rows) {
      call(from, team->rank(), 1);
    }
  }
};

struct Piece {
  int64_t begin;  // in values, of the bucket or, in a reduce-scatter, of each shard
  int64_t end;
  Position position = {};
  std::vector<Span> packed = {};
  int64_t packed_at = 0;  // in bytes
  std::vector<Phase> phases = {};
  std::vector<Span> unpacked = {};
  Rows wires = {};  // what is unpacked

  // Whether the phase's rows come to where those of the phase before lie.
  bool follows_in_place(size_t phase) const {
    return phase > 0 && phases[phase].to.offset == phases[phase - 1].to.offset &&
           phases[phase].to.stride == phases[phase - 1].to.stride;
  }
};

enum class Algorithm : int8_t { kAllReduce, kOneShot, kTwoShot, kTwoLevel };

// All that the plan of a bucket follows from, but for the memory that ranks share.
struct PlanKey {
  Algorithm algorithm;
  bool is_shared;
  bool at_once;
  bool in_place;
  bool rows_add_up;
  DType grad_dtype;
  DType wire_dtype;
  int tag;
  int64_t ranks_per_node;
  int64_t num_values;
  size_t num_gradients;
  int64_t side_bytes;
  double mean_factor;

  bool operator==(const PlanKey& other) const = default;
};

struct Plan {
  std::shared_ptr<Team> team;  // in whose memory the rows lie
  DType packed_as;
  std::vector<Piece> pieces = {};
  int64_t bytes = 0;  // of this rank's region of the memory
  int64_t num_wires = 1;
  std::optional<double> factor = {};  // of what is unpacked, see Bucket::unpack
  Rows side_values = {};              // rows with side values behind them that all ranks see in the end
  int64_t num_side_rows = 0;
  bool is_all_reduce = false;
  bool is_in_place = false;  // in the memory of the only gradient

  size_t num_phases() const { return pieces.empty() ? 0 : pieces.front().phases.size(); }
};

// The plans of a bucket. Messages have the tag and, at most, the three that follow it.
Plan one_shot(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket);
Plan two_shot(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket);
// at_once: between nodes by one_shot, else by two_shot.
Plan two_level(const Levels& levels, int tag, bool at_once, const Bucket& bucket);
// Of one tensor of as many shards as there are ranks: this one's shards of all ranks, each times the factor, are added
// up into the bucket's output.
Plan reduce_scatter(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket, double factor);
// Of what packing has divided by the number of ranks. Side values travel behind the gradients of a float32 wire that is
// memory of its own, else in a collective of their own. in_place: in the gradient's own memory, if there is one of the
// wire's dtype; nobody else may use it meanwhile.
Plan all_reduce(const std::shared_ptr<Team>& team, const Bucket& bucket, bool in_place);

// Bytes of a region that no plan of the bucket needs more of, whatever the bucket travels as.
int64_t most_bytes(const Bucket& bucket, int64_t num_parts);
int64_t most_bytes(const Bucket& bucket, const Levels& levels, bool at_once);

}  // namespace fastsync
