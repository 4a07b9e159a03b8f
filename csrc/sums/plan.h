// How ranks add up one bucket by themselves: a plan, which PlannedSum runs.
//
// Note [Plans]
// ~~~~~~~~~~~~
// A plan cuts a bucket into chunks: while one travels, the next is packed, and the one before is added up or unpacked.
// All chunks take the same phases. In a phase a team exchanges rows, of which each member has one for each other
// member, or gathers them, of which each member has one for all. The rows that a phase has brought are added up, and
// the sums are the rows of the next phase. The rows that the last phase has brought are unpacked.
//
//   one_shot        gather; every rank adds all rows while it unpacks
//   two_shot        exchange, after which rank j adds up everybody's shard j; gather of the means, encoded anew
//   reduce_scatter  the exchange of two_shot alone; the rows are added up into the output
//   two_level       see its builder
//
// Ranks take sums in float32 (float64 for float64 gradients) and in rank order, whatever the wire. So there is one
// rounding on the way in, and one for each sum that travels on, however many ranks there are.
//
// Side values travel at the end of the last chunk's rows. Where rows are added up, so are they.
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

// Adds up the rows that a phase has brought. A row has one shard or several, each of which is encoded by itself.
struct Reduce {
  DType dtype;                // of the rows
  int64_t num_values;         // of a shard
  std::vector<int64_t> outs;  // where each shard's sum goes, in bytes
  double factor;              // of each row
  int64_t begin;              // the first of the bucket's values that are added up
  double residual_factor;     // of this rank's residual, so that it counts in the sum as if packing had sent it
};

struct Phase {
  std::shared_ptr<Team> team;
  int tag;
  bool is_gather;
  Rows sent;                     // by the member that gets them: in an exchange the first members of the team
  Rows received;                 // by the member that they come from; in a gather the same as sent
  bool overwrites_sent = false;  // its rows come to where those lie that the phase before has sent
  std::optional<Reduce> reduce = {};
  Rows side_values = {};  // to be added up once the phase's rows have come, and to be sent on in the next phase

  // Where this rank puts what it has for the member.
  int64_t offset_for(int64_t member) const { return (member == team->rank() ? received : sent).begin(member); }
  std::unique_ptr<Transfer> expect(const at::Tensor& memory) const;
};

struct Chunk {
  int64_t begin;  // in values, of the bucket or, in a reduce-scatter, of each shard
  int64_t end;
  Turn turn;
  std::vector<Range> packed = {};
  int64_t packed_at = 0;  // in bytes
  std::vector<Phase> phases = {};
  std::vector<Range> unpacked = {};
  Rows unpacked_from = {};  // the rows that are added up while they are unpacked
};

enum class Algorithm : int8_t { kAllReduce, kOneShot, kTwoShot, kTwoLevel, kReduceScatter };

// All that a plan follows from, beside the ranks of its teams.
struct PlanKey {
  Algorithm algorithm;
  Algorithm between_nodes;  // kOneShot or kTwoShot, for kTwoLevel
  int64_t ranks_per_node;   // which levels follow from
  bool shares_memory;       // the rows lie in memory that all ranks of a node have
  int64_t region_bytes;     // of that memory, of each rank; 0 while it is not known yet
  int tag;                  // of the first phase's messages; the next three are the plan's as well
  DType grad_dtype;
  DType wire_dtype;
  int64_t num_values;  // that the bucket takes on the wire, or each shard of a reduce-scatter
  int64_t side_bytes;
  bool rows_add_up;  // ranks send parts of the mean, and not what it is the mean of
  double factor;     // of the mean, or of a reduce-scatter's sum

  bool operator==(const PlanKey& other) const = default;

  // What each of so many rows counts in their mean.
  double row_factor(int64_t num_rows) const { return rows_add_up ? 1.0 : 1.0 / static_cast<double>(num_rows); }
};

struct Plan {
  std::shared_ptr<Team> team;  // in whose memory the rows lie
  DType packed_as;
  double factor;  // of each row that is unpacked
  std::vector<Chunk> chunks = {};
  int64_t bytes = 0;  // of this rank's memory; does not depend on the key's region_bytes

  size_t num_phases() const { return chunks.empty() ? 0 : chunks.front().phases.size(); }
  // Whether what the phase sends counts as sent. Between hosts, what stays in a host's memory does not.
  bool counts(const Phase& phase) const {
    return !phase.team->shares_memory() || phase.team->size() == phase.team->group()->getSize();
  }
};

// A plan of one level, for kOneShot, kTwoShot and kReduceScatter.
Plan make_plan(const PlanKey& key, const std::shared_ptr<Team>& team);
// A plan of kTwoLevel.
Plan make_plan(const PlanKey& key, const Levels& levels);

// The key with room for more side values, because their number changes from sync to sync.
PlanKey with_room_for_side_values(PlanKey key);

}  // namespace fastsync
