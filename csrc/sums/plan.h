// Plans: how the ranks add up one bucket by themselves. PlannedSum runs them.
//
// Note [Plans]
// ~~~~~~~~~~~~
// A plan cuts a bucket into chunks. While one chunk travels, the next is packed, and the one before is added up or
// unpacked. All chunks take the same phases. A phase is an exchange, in which each member of a team has a row for each
// other member, or a gather, in which each member has one row for all. The rows that have come in a phase are added up,
// and the sums are the rows of the next phase. The rows that have come in the last phase are unpacked.
//
//   one_shot        gather; every rank adds all rows while it unpacks
//   two_shot        exchange, after which rank j adds up everybody's shard j; gather of the means, encoded anew
//   reduce_scatter  the exchange of two_shot alone; the rows are added up into the output
//   two_level       see its builder
//
// Ranks take sums in float32 (float64 for float64 gradients) and in rank order, whatever the wire. So there is one
// rounding on the way in, and one for each sum that travels on, however many ranks there are.
//
// Side values travel at the end of the last chunk's rows, and are added up over the same ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "sums/flat_gradients.h"
#include "transport/team.h"
#include "transport/teams.h"

namespace fastsync {

// Adds up the rows that have come in a phase. A row has one shard or several, and each is encoded by itself.
struct Reduce {
  DType dtype;                // of the rows
  int64_t num_values;         // of a shard
  std::vector<int64_t> outs;  // where each shard's sum goes, in bytes
  double factor;              // of each row
  int64_t begin;              // the first of the bucket's values that are added up
  double residual_factor;     // of this rank's residuals, so that they count as if packing had sent them
};

struct Phase {
  std::shared_ptr<Team> team;
  int tag;
  bool is_gather;
  Rows sent;                     // by the member that gets it; in an exchange the first members may be all that get one
  Rows received;                 // by the member that it comes from; in a gather the same as sent
  bool overwrites_sent = false;  // the rows that come lie where those lay that the phase before has sent
  std::optional<Reduce> reduce = {};
  Rows side_values = {};  // added up once they have come, and sent on in the next phase; count 0 if there are none

  // Where this rank puts its row for the member.
  int64_t offset_for(int64_t member) const { return (member == team->rank() ? received : sent).begin(member); }
  std::unique_ptr<Transfer> expect(const at::Tensor& memory) const;
};

struct Chunk {
  int64_t begin;  // in values, of the bucket or, in a reduce-scatter, of each shard
  int64_t end;
  Position position;
  std::vector<Range> packed = {};
  int64_t packed_at = 0;  // where the ranges' offsets count from, in bytes
  std::vector<Phase> phases = {};
  std::vector<Range> unpacked = {};
  Rows unpacked_from = {};  // added up while they are unpacked; the ranges' offsets count from the first
};

enum class Algorithm : int8_t { kAllReduce, kOneShot, kTwoShot, kTwoLevel, kReduceScatter };

// All that a plan follows from, apart from the teams.
struct PlanKey {
  Algorithm algorithm;
  Algorithm between_nodes;  // kOneShot or kTwoShot, for kTwoLevel
  int64_t ranks_per_node;   // for kTwoLevel without shared memory: the teams follow from it
  bool shares_memory;       // all ranks of a host have the memory that rows lie in
  int64_t region_bytes;     // how much of that memory each rank fills; 0 before there is any
  int tag;                  // of the first phase's messages; the next three are the plan's as well
  DType grad_dtype;
  DType wire_dtype;
  int64_t num_values;  // that the bucket takes on the wire, or each shard of a reduce-scatter
  int64_t side_bytes;
  bool rows_add_up;  // the mean is the sum of what the ranks send, because each has weighted its values
  double factor;     // multiplies the mean or, in a reduce-scatter, the sum

  bool operator==(const PlanKey& other) const = default;

  // What the values of each of so many rows are multiplied with.
  double row_factor(int64_t num_rows) const { return rows_add_up ? 1.0 : 1.0 / static_cast<double>(num_rows); }
};

struct Plan {
  std::shared_ptr<Team> team;  // in whose memory the rows lie
  DType packed_as;
  double factor;  // multiplies each row that is unpacked
  std::vector<Chunk> chunks = {};
  int64_t bytes = 0;  // that this rank needs for rows, whatever the key's region_bytes

  size_t num_phases() const { return chunks.empty() ? 0 : chunks.front().phases.size(); }
  // Whether the phase's bytes count as sent. Among several hosts, those that stay in a host's memory do not.
  bool counts(const Phase& phase) const {
    return !phase.team->shares_memory() || phase.team->size() == phase.team->group()->getSize();
  }
};

// Makes a plan of kOneShot, kTwoShot or kReduceScatter.
Plan make_plan(const PlanKey& key, const std::shared_ptr<Team>& team);
// Makes a plan of kTwoLevel.
Plan make_plan(const PlanKey& key, const Levels& levels);

// The same key with room for more side values, because their number changes from sync to sync.
PlanKey with_room_for_side_values(PlanKey key);

}  // namespace fastsync
