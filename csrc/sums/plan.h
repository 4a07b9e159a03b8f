// A plan tells how the ranks add up one bucket by themselves. PlannedSum runs it.
//
// Note [Plans]
// ~~~~~~~~~~~~
// A plan cuts a bucket into chunks. While one chunk travels, the next is packed, and the one before is added up or
// unpacked. All chunks take the same phases. In a phase the members of a team send rows to each other. In an exchange,
// each member has a row for each other member. In a gather, each member has one row for all. The rows that have come in
// a phase are added up, and the sums are the rows of the next phase. The rows that have come in the last phase are
// unpacked.
//
//   one_shot        A gather. Every rank adds all rows while it unpacks.
//   two_shot        An exchange, after which rank j adds up everybody's shard j. Then a gather of the means, encoded
//                   anew.
//   reduce_scatter  The exchange of two_shot alone. The rows are added up into the output.
//   two_level       See TwoLevelPlanner.
//   all_gather      A gather of what each rank has. Nothing is added up. Parameters travel by it.
//
// With keeps_shard, each rank takes only its own shard of each chunk, and gets the same bits as without. A two_shot
// then has no gather, unless its wire rounds the means. Without shared memory a one_shot becomes an exchange, because a
// rank needs no other shard. On two levels the ranks of each host take all shards.
//
// Ranks add in float32 (float64 for float64 gradients) and in rank order, whatever the wire is. So values are rounded
// once when they are packed, and once for each sum that travels on, however many ranks there are. With micro-batches
// ranks add by Note [Sums by a tree] instead.
//
// Note [Own values]
//   With keeps_shard a rank adds up its own shard alone, and nobody else reads its row for itself. Where values travel
//   as they are, it does not pack them, and reads them from the gradients. That spares a copy of one shard.
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

// Tells how to add up the rows that have come in a phase. A row has one shard or several, whose sums are encoded one by
// one.
struct Reduce {
  DType dtype;                // the dtype of the rows
  int64_t num_values;         // how many values a shard has
  std::vector<int64_t> outs;  // where each shard's sum goes, in bytes
  double factor;              // multiplies each row
  int64_t begin;              // the index of the first value that is added up, in the bucket
  double residual_factor;     // multiplies this rank's residuals, so that they count as if packing had sent them
};

struct Phase {
  std::shared_ptr<Team> team;
  int tag;
  bool is_gather;
  Rows sent;                     // row j goes to member j; in an exchange perhaps only the first members get one
  Rows received;                 // row j comes from member j; in a gather the same rows as sent
  bool overwrites_sent = false;  // received takes the memory of rows that the phase before has sent
  std::optional<Reduce> reduce = {};
  Rows side_values = {};  // added up once they have come, and sent on in the next phase; count 0 if there are none

  // Where this rank puts its row for the member, in bytes.
  int64_t offset_for(int64_t member) const { return (member == team->rank() ? received : sent).begin(member); }
  // Makes the transfer of the phase's rows.
  std::unique_ptr<Transfer> expect(const at::Tensor& memory) const;
};

struct Chunk {
  int64_t begin;  // index of the first value, in the bucket or, in a reduce-scatter, in each shard
  int64_t end;
  Position position;
  std::vector<Range> packed = {};  // these values are packed into the first phase's rows
  int64_t packed_at = 0;           // where the offsets of `packed` count from, in bytes
  std::vector<Phase> phases = {};  // the same number for all chunks
  // Of the packed ones: those that this rank alone unpacks. It may leave them where they are, see
  // Note [Own values].
  std::optional<Range> own = {};
  std::vector<Range> packed_for_others = {};  // the packed ones without it; empty without own
  std::vector<Range> unpacked = {};           // these values are unpacked from the last phase's rows
  Rows unpacked_from = {};  // rows that unpacking adds up; the offsets of `unpacked` count from the first
};

enum class Algorithm : int8_t { kAllReduce, kOneShot, kTwoShot, kTwoLevel, kReduceScatter, kAllGather };

// All that determines a plan, apart from the teams. A change of the key makes a new plan.
struct PlanKey {
  Algorithm algorithm;
  Algorithm between_nodes = Algorithm::kTwoShot;  // kOneShot or kTwoShot, for kTwoLevel
  int64_t ranks_per_node = 1;                     // determines the teams, for kTwoLevel without shared memory
  bool shares_memory;                             // whether the rows lie in memory that all ranks of a host share
  int64_t region_bytes;                           // each rank's part of that memory; 0 before there is any
  int tag;  // the tag of the first phase's messages; the next three tags are the plan's as well
  DType grad_dtype;
  DType wire_dtype;
  int64_t num_values;  // how many values the bucket takes on the wire, or each shard of a reduce-scatter or all-gather
  int64_t side_bytes = 0;
  bool keeps_shard = false;  // whether a rank takes only its own shards
  // Whether the mean is the sum of what the ranks send, because each has weighted its values, or has a sum over
  // micro-batches.
  bool rows_add_up = false;
  double factor = 1.0;  // multiplies the mean or, in a reduce-scatter, the sum

  bool operator==(const PlanKey& other) const = default;

  // The factor of each row when so many rows are added up.
  double row_factor(int64_t num_rows) const { return rows_add_up ? 1.0 : 1.0 / static_cast<double>(num_rows); }
};

struct Plan {
  std::shared_ptr<Team> team;          // the rows lie in this team's memory
  std::shared_ptr<SharedTeam> shared;  // the same team if its ranks share memory, else null
  DType packed_as;                     // the dtype that packing encodes to
  double factor;                       // multiplies each row that is unpacked
  std::vector<Chunk> chunks = {};
  // With keeps_shard: which of the bucket's values each of the team's ranks takes. The offsets count from the first of
  // them. Empty without.
  std::vector<std::vector<Range>> shards = {};
  int64_t bytes = 0;  // how much memory this rank needs for rows, whatever the key's region_bytes

  size_t num_phases() const { return chunks.empty() ? 0 : chunks.front().phases.size(); }
  // Whether the phase's bytes count as sent. They do not if they stay on one of several hosts.
  bool counts_as_sent(const Phase& phase) const {
    return !phase.team->shares_memory() || phase.team->size() == phase.team->group()->getSize();
  }
};

// Makes a plan, except of kAllReduce. Its ranks are those of this rank's host if the key says so and there is room in
// their memory. Before there is room on a single host, all ranks are the same ranks.
Plan make_plan(const PlanKey& key, Teams& teams);

// Whether an all-gather has its rows in the memory of the values, so that it copies nothing.
bool gathers_in_place(const PlanKey& key);

// Returns the key with room for more side values, because their number changes from sync to sync.
PlanKey with_room_for_side_values(PlanKey key);

}  // namespace fastsync
