#include "sums/plan.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace fastsync {

namespace {

constexpr int64_t kRowAlignment = 64;  // in bytes
constexpr int64_t kSmallestShardBytes = 1 << 18;
// Without shared memory, a bucket of up to so many bytes is one chunk. Each message wakes a thread. If cores are busy,
// that costs more than chunks gain.
constexpr int64_t kOneChunkBytes = 1 << 22;

// Shards are multiples of so many values. On a wire of blocks rows then begin at multiples of 16 bytes.
int64_t shard_multiple(DType dtype) {
  const WireUnit unit = unit_of(dtype);
  return unit.values > 1 ? unit.values * (16 / std::gcd(int64_t{16}, unit.bytes)) : kBlockValues;
}

// Regions are multiples of so many bytes, so that the offset from one to the next is a number of whole units.
const int64_t kRegionAlignment = [] {
  int64_t alignment = kRowAlignment;
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    alignment = std::lcm(alignment, 4 * unit_of(static_cast<DType>(dtype)).bytes);
  }
  return alignment;
}();

// The size of a row, see Rows.
struct Row {
  int64_t length;
  int64_t stride;
};

struct ExchangeRows {
  Rows sent;
  Rows received;
  Rows gathered;  // the rows of a gather that follows, in memory whose rows were sent or read before
};

Phase exchange(std::shared_ptr<Team> team, int tag, const Rows& sent, const Rows& received) {
  return {std::move(team), tag, /*is_gather=*/false, sent, received};
}

Phase gather(std::shared_ptr<Team> team, int tag, const Rows& rows) {
  return {std::move(team), tag, /*is_gather=*/true, rows, rows};
}

// Note [Regions]
//   In shared memory each rank fills a region of its own, in memory near its core. The regions of a team follow each
//   other. An exchange between 3 ranks takes these rows of them, where i>j goes from rank i to rank j:
//
//     region of rank 0      region of rank 1      region of rank 2
//     | 0>0 | 0>1 | 0>2 |   | 1>0 | 1>1 | 1>2 |   | 2>0 | 2>1 | 2>2 |
//
//     sent       Rank 1 fills the rows of its own region.
//     received   Rank 1 reads the row i>1 in each region i.
//     gathered   Rank i writes the sum of what it has read to its row i>i, and all ranks read these rows.
//
//   Without shared memory a rank has one region, with room for what others send. That of rank 1 is:
//
//     | 1>0 | unused | 1>2 | 0>1 | 1>1 | 2>1 |
//     sent, later gathered | received
//
//   A chunk of a plan of two levels takes more of a region. In shared memory it is, with 2 ranks in a node, 3 nodes and
//   two steps between nodes:
//
//     | row for | row for | to     | to     | to     | from   | from   | from   | own block:           |
//     | rank 0  | rank 1  | node 0 | node 1 | node 2 | node 0 | node 1 | node 2 | node 0, node 1, ...  |
//     in_node.sent          to_nodes                 from_nodes                 a row of blocks
//
//   In one step there are no to_nodes and no from_nodes. Without shared memory in_node takes both halves, as above, and
//   blocks are those of all ranks of the node.

// Lays out a plan's chunks and their rows, at the same offsets on every rank. See Note [Regions].
class Planner {
 public:
  // Each chunk has num_shards shards, which different ranks add up. The key must outlive the planner.
  Planner(const PlanKey& key, std::shared_ptr<Team> team, DType packed_as, int64_t num_shards, double factor)
      : key_(key), plan_{std::move(team), nullptr, packed_as, factor}, num_shards_(num_shards) {}

  // Returns how many values each chunk but the last has, if there are so many values in all.
  int64_t chunk_length(int64_t num_values) const {
    if (!plan_.team->device().is_cpu()) {
      return INT64_MAX / 2 / kBlockValues * kBlockValues;
    }
    const bool is_small = !key_.shares_memory && bytes_of(num_values, key_.grad_dtype) <= kOneChunkBytes;
    const int64_t least = is_small ? kOneChunkBytes : num_shards_ * kSmallestShardBytes;
    return values_in(std::max(kChunkBytes, least), key_.wire_dtype) / kBlockValues * kBlockValues;
  }

  // Cuts so many values into chunks of this length. Without any values there is still a chunk for side values.
  std::vector<Chunk>& cut(int64_t num_values, int64_t length) {
    if (num_values == 0 && key_.side_bytes > 0) {
      plan_.chunks.push_back({0, 0, {true, true}});
    }
    for (int64_t begin = 0; begin < num_values; begin += length) {
      const int64_t end = std::min(begin + length, num_values);
      plan_.chunks.push_back({begin, end, {begin == 0, end == num_values}});
    }
    return plan_.chunks;
  }

  // Returns how many values of the chunk each shard has.
  int64_t shard_length(const Chunk& chunk) const { return shard_length(chunk, num_shards_); }
  int64_t shard_length(const Chunk& chunk, int64_t num_shards) const {
    return round_up((chunk.end - chunk.begin + num_shards - 1) / num_shards, shard_multiple(key_.wire_dtype));
  }

  // Returns the size of a row of so many values. In the last chunk the side values follow them.
  Row row_of(const Chunk& chunk, int64_t values, DType dtype) const {
    const int64_t bytes = bytes_of(values, dtype);
    const bool has_more = chunk.position.is_last && key_.side_bytes > 0;
    const int64_t length = has_more ? round_up(bytes, sizeof(float)) + key_.side_bytes : bytes;
    const int64_t alignment = unit_of(dtype).values > 1 ? bytes_of(shard_multiple(dtype), dtype) : kRowAlignment;
    return {length, round_up(length, alignment)};
  }

  // Returns the side values at the end of these rows. There are none unless the chunk is the last.
  Rows side_values(const Chunk& chunk, const Rows& rows) const {
    return {rows.offset + rows.length - key_.side_bytes, key_.side_bytes, rows.stride,
            chunk.position.is_last && key_.side_bytes > 0 ? rows.count : 0};
  }

  // Lays out the rows of an exchange in which only the first num_receivers members get a row. In shared memory a row is
  // received where it is sent from.
  ExchangeRows exchange_rows(int64_t num_receivers, const Row& row) {
    const auto& [length, stride] = row;
    const int64_t size = plan_.team->size();
    if (!key_.shares_memory) {
      const Rows sent{take(2 * num_receivers * stride), length, stride, num_receivers};
      return {sent, {sent.begin(num_receivers), length, stride, size}, sent};
    }
    const int64_t begin = take(num_receivers * stride);
    return {{own_region() + begin, length, stride, num_receivers},
            {begin + plan_.team->rank() * stride, length, key_.region_bytes, size},
            {begin, length, key_.region_bytes + stride, size}};
  }

  // Lays out the rows of a gather: one of each member, which goes to all members.
  Rows gather_rows(const Row& row) {
    const int64_t size = plan_.team->size();
    const int64_t begin = take((key_.shares_memory ? 1 : size) * row.stride);
    return {begin, row.length, key_.shares_memory ? key_.region_bytes : row.stride, size};
  }

  // Lays out rows in this rank's region.
  Rows own_rows(int64_t count, const Row& row) {
    return {own_region() + take(count * row.stride), row.length, row.stride, count};
  }
  // Takes rows that own_rows has laid out. Returns the same rows of the first member's region in shared memory, or of
  // this rank's only region.
  Rows rows_of_first(Rows own) const {
    own.offset -= own_region();
    return own;
  }

  // Packs the chunk's shards into the rows of the first phase.
  void pack_shards(Chunk& chunk, int64_t length) const {
    const Phase& phase = chunk.phases.front();
    chunk.packed_at = phase.sent.offset;
    chunk.packed = shards(chunk, length, plan_.packed_as,
                          [&](int64_t member) { return phase.offset_for(member) - phase.sent.offset; });
  }

  // Unpacks the chunk's shards, each from the row of the member that has it.
  void unpack_shards(Chunk& chunk, int64_t length, const Rows& rows) const {
    chunk.unpacked_from = {rows.offset, rows.length, rows.stride, /*count=*/1};
    chunk.unpacked = shards(chunk, length, key_.wire_dtype, [&](int64_t member) { return member * rows.stride; });
  }

  // Notes the packed range that this rank adds up itself.
  void note_own(Chunk& chunk) const {
    if (const auto rank = static_cast<size_t>(plan_.team->rank()); rank < chunk.packed.size()) {
      chunk.own = chunk.packed[rank];
      chunk.packed_for_others = chunk.packed;
      chunk.packed_for_others.erase(chunk.packed_for_others.begin() + plan_.team->rank());
    }
  }

  // Unpacks only this rank's shard of the chunk, which begins so many values behind the beginning of the rows.
  void keep_shard(Chunk& chunk, int64_t length, const Rows& rows, int64_t skipped) {
    chunk.unpacked_from = rows;
    plan_.shards.resize(plan_.team->size());
    for (int64_t member = 0; member < plan_.team->size(); ++member) {
      std::vector<Range>& shard = plan_.shards[member];
      const int64_t begin = std::min(chunk.begin + member * length, chunk.end);
      const int64_t end = std::min(begin + length, chunk.end);
      const int64_t kept = shard.empty() ? 0 : shard.back().offset + length_of(shard.back());
      if (begin < end) {
        shard.push_back({begin, end, kept});
        if (member == plan_.team->rank()) {
          chunk.unpacked = {{kept, kept + end - begin, skipped}};
        }
      }
    }
  }

  Plan done() && {
    plan_.bytes = round_up(used_, kRegionAlignment);
    return std::move(plan_);
  }

 private:
  static int64_t length_of(const Range& range) { return range.end - range.begin; }

  // Returns the chunk's shards as ranges. offset_of(member) tells where the member's shard begins, in bytes.
  static std::vector<Range> shards(const Chunk& chunk, int64_t length, DType dtype,
                                   const std::function<int64_t(int64_t)>& offset_of) {
    std::vector<Range> ranges;
    for (int64_t member = 0; chunk.begin + member * length < chunk.end; ++member) {
      const int64_t first = chunk.begin + member * length;
      ranges.push_back({first, std::min(first + length, chunk.end), values_in(offset_of(member), dtype)});
    }
    return ranges;
  }

  // Where this rank's region begins, in bytes.
  int64_t own_region() const { return key_.shares_memory ? plan_.team->rank() * key_.region_bytes : 0; }
  // Sets aside so many bytes of each rank's region. Returns where they begin in it.
  int64_t take(int64_t bytes) { return std::exchange(used_, round_up(used_ + bytes, kRowAlignment)); }

  const PlanKey& key_;
  Plan plan_;
  int64_t num_shards_;
  int64_t used_ = 0;
};

Plan one_shot(const PlanKey& key, const std::shared_ptr<Team>& team) {
  Planner planner(key, team, key.wire_dtype, /*num_shards=*/1, key.factor * key.row_factor(team->size()));
  for (Chunk& chunk : planner.cut(key.num_values, planner.chunk_length(key.num_values))) {
    const Rows rows = planner.gather_rows(planner.row_of(chunk, chunk.end - chunk.begin, key.wire_dtype));
    chunk.packed_at = rows.begin(team->rank());
    chunk.packed = chunk.unpacked = {{chunk.begin, chunk.end, /*offset=*/0}};
    chunk.unpacked_from = rows;
    chunk.phases = {gather(team, key.tag, rows)};
    chunk.phases.back().side_values = planner.side_values(chunk, rows);
    if (key.keeps_shard) {
      const int64_t shard = planner.shard_length(chunk, team->size());
      chunk.packed.clear();
      for (int64_t begin = chunk.begin; begin < chunk.end; begin += shard) {
        chunk.packed.push_back({begin, std::min(begin + shard, chunk.end), begin - chunk.begin});
      }
      chunk.unpacked.clear();
      planner.keep_shard(chunk, shard, rows, team->rank() * shard);
      planner.note_own(chunk);
    }
  }
  return std::move(planner).done();
}

Plan two_shot(const PlanKey& key, const std::shared_ptr<Team>& team) {
  const int64_t size = team->size();
  const auto alone =  // means that are kept go to nobody
      key.keeps_shard
          ? std::make_shared<Team>(team->group(), team->device(), std::vector<int64_t>{team->group()->getRank()})
          : nullptr;
  const bool adds_while_unpacking =
      key.keeps_shard && (key.wire_dtype == key.grad_dtype || key.algorithm == Algorithm::kOneShot);
  Planner planner(key, team, key.wire_dtype, /*num_shards=*/size,
                  adds_while_unpacking ? key.factor * key.row_factor(size) : key.factor);
  for (Chunk& chunk : planner.cut(key.num_values, planner.chunk_length(key.num_values))) {
    const int64_t shard = planner.shard_length(chunk);
    auto [sent, received, means] = planner.exchange_rows(size, planner.row_of(chunk, shard, key.wire_dtype));
    means.length = bytes_of(shard, key.wire_dtype);  // no side values travel with them
    chunk.phases = {exchange(team, key.tag, sent, received)};
    planner.pack_shards(chunk, shard);
    if (adds_while_unpacking) {
      chunk.phases.back().side_values = planner.side_values(chunk, received);
      planner.keep_shard(chunk, shard, received, /*skipped=*/0);
      planner.note_own(chunk);
      continue;
    }
    chunk.phases.push_back(gather(key.keeps_shard ? alone : team, key.tag + 1, means));
    chunk.phases.front().reduce = Reduce{.dtype = key.wire_dtype,
                                         .num_values = shard,
                                         .outs = {means.begin(team->rank())},
                                         .factor = key.row_factor(size),
                                         .begin = chunk.begin + team->rank() * shard,
                                         .residual_factor = 1.0 / static_cast<double>(size)};
    chunk.phases.back().overwrites_sent = !key.shares_memory;
    chunk.phases.back().side_values = planner.side_values(chunk, received);
    if (key.keeps_shard) {
      planner.keep_shard(chunk, shard, {means.begin(team->rank()), means.length, means.stride, /*count=*/1}, 0);
    } else {
      planner.unpack_shards(chunk, shard, means);
    }
  }
  return std::move(planner).done();
}

Plan reduce_scatter(const PlanKey& key, const std::shared_ptr<Team>& team) {
  const int64_t size = team->size();
  Planner planner(key, team, key.wire_dtype, /*num_shards=*/size, key.factor);
  const int64_t length = round_up(planner.chunk_length(size * key.num_values) / size, kBlockValues);
  for (Chunk& chunk : planner.cut(key.num_values, length)) {
    const int64_t values = round_up(chunk.end - chunk.begin, kBlockValues);
    const ExchangeRows rows = planner.exchange_rows(size, planner.row_of(chunk, values, key.wire_dtype));
    chunk.phases = {exchange(team, key.tag, rows.sent, rows.received)};
    chunk.packed_at = rows.sent.offset;
    for (int64_t member = 0; member < size; ++member) {
      const int64_t offset = chunk.phases.back().offset_for(member) - rows.sent.offset;
      const int64_t shard = member * key.num_values;
      chunk.packed.push_back({shard + chunk.begin, shard + chunk.end, values_in(offset, key.wire_dtype)});
    }
    chunk.unpacked = {{chunk.begin, chunk.end, /*offset=*/0}};
    chunk.unpacked_from = rows.received;
  }
  return std::move(planner).done();
}

// A rank takes its own values as well, as the wire has carried them.
Plan all_gather(const PlanKey& key, const std::shared_ptr<Team>& team) {
  const bool in_place = gathers_in_place(key);
  Planner planner(key, team, key.wire_dtype, /*num_shards=*/1, key.factor);
  for (Chunk& chunk : planner.cut(key.num_values, in_place ? key.num_values : planner.chunk_length(key.num_values))) {
    const Rows rows = planner.gather_rows(planner.row_of(chunk, chunk.end - chunk.begin, key.wire_dtype));
    chunk.phases = {gather(team, key.tag, rows)};
    chunk.packed_at = rows.begin(team->rank());
    chunk.unpacked_from = {rows.offset, rows.length, rows.stride, /*count=*/1};
    for (int64_t member = 0; member < team->size() && !in_place; ++member) {
      const int64_t part = member * key.num_values;
      const bool is_own = member == team->rank();
      if (is_own) {
        chunk.packed = {{part + chunk.begin, part + chunk.end, /*offset=*/0}};
      }
      if (!is_own || key.wire_dtype != DType::kBytes) {
        const int64_t offset = values_in(member * rows.stride, key.wire_dtype);
        chunk.unpacked.push_back({part + chunk.begin, part + chunk.end, offset});
      }
    }
  }
  Plan plan = std::move(planner).done();
  plan.bytes = in_place ? team->size() * key.num_values : plan.bytes;
  return plan;
}

// Plans for two levels. Inside a node, where links are fast, values travel in the gradients' dtype. Between nodes they
// travel in the wire's dtype. Local rank l is the rank with index l in its node. The first ranks of each node have
// peers: the ranks with the same index on all other nodes.
//
//   exchange_in_node    Local rank l gets shard l from each rank of its node, and adds it up.
//   send_between_nodes  In one step: it sends the sum, encoded, to its peers. Ranks add while they unpack.
//                       In two steps: if its node is node m, it gets sub-shard m from its peers, and adds it up. Then
//                       it sends the sum to them.
//   gather_in_node      Local rank l sends all that it has of shard l to its node.
//
// So each sum that travels between nodes is rounded once. In two steps each value crosses between nodes about twice. In
// one step it crosses once to each other node.
//
// A node's sum is divided by the number of ranks of the largest node, so that it is never larger than its ranks'
// values. The sums of all nodes, each times node_factor_, add up to the mean over the ranks.
class TwoLevelPlanner {
 public:
  TwoLevelPlanner(const PlanKey& key, const Levels& levels)
      : key_(key),
        levels_(levels),
        node_factor_(key.rows_add_up ? 1.0
                                     : static_cast<double>(levels.most_ranks) / static_cast<double>(levels.num_ranks)),
        planner_(key, levels.node, key.grad_dtype, levels.num_local_ranks * (in_one_step() ? 1 : levels.num_nodes),
                 in_one_step() ? key.factor * node_factor_ : key.factor) {}

  Plan make() && {
    for (Chunk& chunk : planner_.cut(key_.num_values, planner_.chunk_length(key_.num_values))) {
      const RowLayout layout = lay_out(chunk);
      exchange_in_node(chunk, layout);
      if (levels_.peers) {
        send_between_nodes(chunk, layout);
      }
      gather_in_node(chunk, layout);
    }
    return std::move(planner_).done();
  }

 private:
  // The shards and rows of a chunk, see Note [Regions].
  struct RowLayout {
    int64_t sub_shard;     // how many values a sub-shard has; in one step a shard is one sub-shard
    int64_t shard;         // how many values a shard has
    int64_t begin;         // the index of the first value of this rank's shard, in the bucket
    ExchangeRows in_node;  // the rows of exchange_in_node, in the gradients' dtype
    Rows to_nodes;         // in two steps: this node's sums, a sub-shard for each node
    Rows from_nodes;       // in two steps: each node's sums of this node's sub-shard
    Rows blocks;           // by local rank: what all nodes have of its shard
    Rows own_block;        // by node: what the node has of this rank's shard
  };

  bool in_one_step() const { return key_.between_nodes == Algorithm::kOneShot; }

  RowLayout lay_out(const Chunk& chunk) {
    const int64_t nodes = levels_.num_nodes;
    RowLayout layout{};
    layout.sub_shard = planner_.shard_length(chunk);
    layout.shard = (in_one_step() ? 1 : nodes) * layout.sub_shard;
    layout.begin = chunk.begin + levels_.node->rank() * layout.shard;
    layout.in_node =
        planner_.exchange_rows(levels_.num_local_ranks, planner_.row_of(chunk, layout.shard, key_.grad_dtype));
    Row row = planner_.row_of(chunk, layout.sub_shard, key_.wire_dtype);
    if (!in_one_step()) {
      layout.to_nodes = planner_.own_rows(nodes, row);
      layout.from_nodes = planner_.own_rows(nodes, row);
      row.length = row.stride = bytes_of(layout.sub_shard, key_.wire_dtype);  // without gaps, so that a block is a row
    }
    layout.blocks = planner_.gather_rows({nodes * row.stride, nodes * row.stride});
    layout.own_block = {layout.blocks.begin(levels_.node->rank()), row.length, row.stride, nodes};
    return layout;
  }

  void exchange_in_node(Chunk& chunk, const RowLayout& layout) const {
    Phase& phase =
        chunk.phases.emplace_back(exchange(levels_.node, key_.tag, layout.in_node.sent, layout.in_node.received));
    planner_.pack_shards(chunk, layout.shard);
    if (!levels_.peers) {
      return;  // it has no shard to add up
    }
    phase.side_values = planner_.side_values(chunk, layout.in_node.received);
    phase.reduce = Reduce{.dtype = key_.grad_dtype,
                          .num_values = layout.sub_shard,
                          .outs = {},
                          .factor = key_.row_factor(levels_.most_ranks),
                          .begin = layout.begin,
                          .residual_factor = 1.0 / (static_cast<double>(levels_.num_ranks) * node_factor_)};
  }

  // Sends the sums of the phase before to the peers.
  void send_between_nodes(Chunk& chunk, const RowLayout& layout) const {
    const std::shared_ptr<Team>& peers = levels_.peers;
    std::vector<int64_t>& sums = chunk.phases.back().reduce->outs;
    const int64_t own_row = layout.own_block.begin(peers->rank());
    if (in_one_step()) {
      sums = {own_row};
      chunk.phases.push_back(gather(peers, key_.tag + 1, layout.own_block));
      return;
    }
    Phase scatter = exchange(peers, key_.tag + 1, layout.to_nodes, layout.from_nodes);
    for (int64_t node = 0; node < levels_.num_nodes; ++node) {
      sums.push_back(scatter.offset_for(node));
    }
    scatter.reduce = Reduce{.dtype = key_.wire_dtype,
                            .num_values = layout.sub_shard,
                            .outs = {own_row},
                            .factor = node_factor_,
                            .begin = layout.begin + peers->rank() * layout.sub_shard,
                            .residual_factor = 1.0 / static_cast<double>(levels_.num_ranks)};
    chunk.phases.push_back(std::move(scatter));
    chunk.phases.push_back(gather(peers, key_.tag + 2, layout.own_block));
  }

  // Each rank reads the side values that the first local rank has, because that rank has peers on all nodes.
  void gather_in_node(Chunk& chunk, const RowLayout& layout) {
    Phase& phase = chunk.phases.emplace_back(gather(levels_.node, key_.tag + 3, layout.blocks));
    planner_.unpack_shards(chunk, layout.shard, layout.blocks);
    Rows of_first = planner_.rows_of_first(layout.from_nodes);
    if (in_one_step()) {
      of_first = layout.own_block;
      of_first.offset = layout.blocks.offset;
      chunk.unpacked_from = of_first;
    }
    if (key_.keeps_shard) {
      const int64_t skipped = values_in(levels_.node->rank() * layout.blocks.stride, key_.wire_dtype);
      chunk.unpacked.clear();
      planner_.keep_shard(chunk, layout.shard, Rows(chunk.unpacked_from), skipped);
    }
    phase.side_values = planner_.side_values(chunk, of_first);
  }

  const PlanKey& key_;
  const Levels& levels_;
  const double node_factor_;
  Planner planner_;
};

Plan two_level(const PlanKey& key, const Levels& levels) { return TwoLevelPlanner(key, levels).make(); }

}  // namespace

std::unique_ptr<Transfer> Phase::expect(const at::Tensor& memory) const {
  return is_gather ? team->all_gather(memory, sent, tag) : team->all_to_all(memory, sent, received, tag);
}

// The nodes of two levels are the hosts if ranks share memory, else the nodes that the compression names.
Plan make_plan(const PlanKey& key, Teams& teams) {
  const auto shared = key.shares_memory ? teams.shared() : nullptr;
  const std::shared_ptr<Team> team = shared ? shared : teams.all();
  Plan plan = [&] {
    switch (key.algorithm) {
      case Algorithm::kOneShot:
        return key.keeps_shard && !key.shares_memory ? two_shot(key, team) : one_shot(key, team);
      case Algorithm::kTwoShot:
        return two_shot(key, team);
      case Algorithm::kReduceScatter:
        return reduce_scatter(key, team);
      case Algorithm::kAllGather:
        return all_gather(key, team);
      case Algorithm::kTwoLevel:
        return two_level(
            key, key.shares_memory ? teams.hosts() : levels_of(*team, nodes_of(key.ranks_per_node, team->size())));
      case Algorithm::kAllReduce:
        break;
    }
    TORCH_INTERNAL_ASSERT(false, "the process group adds by itself");
  }();
  plan.shared = shared;
  return plan;
}

bool gathers_in_place(const PlanKey& key) {
  return key.wire_dtype == DType::kBytes && !key.shares_memory && key.num_values % kRowAlignment == 0;
}

PlanKey with_room_for_side_values(PlanKey key) {
  constexpr int64_t kSideBytes = 4096;
  key.side_bytes = round_up(key.side_bytes + 1, kSideBytes);
  return key;
}

}  // namespace fastsync
