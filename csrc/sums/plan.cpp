#include "sums/plan.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

namespace fastsync {

namespace {

constexpr int64_t kRowAlignment = 64;  // in bytes
constexpr int64_t kSmallestShardBytes = 1 << 18;
// Of gradients. A message wakes who waits for it, and where cores are busy that takes longer than what pieces win.
constexpr int64_t kOnePieceBytes = 1 << 22;

// What parts are multiples of, in values. Of a wire of blocks so many that rows begin at multiples of 16 bytes.
int64_t part_multiple(DType dtype) {
  const WireUnit unit = unit_of(dtype);
  return unit.values > 1 ? unit.values * (16 / std::gcd(int64_t{16}, unit.bytes)) : kBlockValues;
}

// What regions are multiples of: units of any wire are counted from region to region.
const int64_t kRegionAlignment = [] {
  int64_t alignment = kRowAlignment;
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    alignment = std::lcm(alignment, 4 * unit_of(static_cast<DType>(dtype)).bytes);
  }
  return alignment;
}();

// Of an exchange: the rows that leave, those that come, and those of a gather that may take the place of what has left
// or has been read.
struct Exchange {
  Rows to;
  Rows from;
  Rows gathered;
};

// Lays out a plan's pieces and their rows, at the same places on every rank. Each member fills a region of its own, so
// that its memory can lie near it. Where members share memory, all regions are there, one after the other. Else this
// rank's is alone, with room for what others send.
class Planner {
 public:
  // So many ranks add up a part of each piece.
  Planner(std::shared_ptr<Team> team, DType packed_as, int64_t num_parts, const Bucket& bucket)
      : plan_{std::move(team), packed_as}, num_parts_(num_parts), bucket_(bucket) {
    side_bytes_ = bucket.side_bytes();
  }

  Plan& plan() { return plan_; }

  // How many values a piece has, but the last; in_shards: pieces of which each rank adds up a part.
  int64_t values_of_piece(bool in_shards) const {
    const bool is_small = !shares_memory() && bytes_of(bucket_.num_values, bucket_.grad_dtype) <= kOnePieceBytes;
    const int64_t least = is_small ? kOnePieceBytes : (in_shards ? num_parts_ * kSmallestShardBytes : 0);
    const int64_t bytes = bucket_.device.is_cpu() ? std::max(kPieceBytes, least) : INT64_MAX / 2;
    return values_in(bytes, bucket_.wire_dtype) / kBlockValues * kBlockValues;
  }

  // lay_out(piece) for pieces of so many values each. Side values travel even where there are no others.
  void add_pieces(int64_t num_values, int64_t of_each, const std::function<void(Piece&)>& lay_out) {
    if (num_values == 0 && side_bytes_ > 0) {
      lay_out(plan_.pieces.emplace_back(Piece{0, 0, {true, true}}));
    }
    for (int64_t begin = 0; begin < num_values; begin += of_each) {
      const int64_t end = std::min(begin + of_each, num_values);
      Piece& piece = plan_.pieces.emplace_back(Piece{begin, end, {begin == 0, end == num_values}});
      lay_out(piece);
    }
  }

  // How many values of a piece each part has.
  int64_t part_of(const Piece& piece) const {
    return round_up((piece.end - piece.begin + num_parts_ - 1) / num_parts_, part_multiple(bucket_.wire_dtype));
  }

  // A row of so many values, with room for side values behind those of the bucket's last piece.
  Rows row_of(int64_t values, DType dtype, bool is_last) const {
    const int64_t bytes = bytes_of(values, dtype);
    const int64_t length = is_last && side_bytes_ > 0 ? round_up(bytes, sizeof(float)) + side_bytes_ : bytes;
    const int64_t alignment = unit_of(dtype).values > 1 ? bytes_of(part_multiple(dtype), dtype) : kRowAlignment;
    return {0, length, round_up(length, alignment)};
  }

  // Rows for the first num_rows members. In shared memory what is sent is where it is received.
  Exchange exchange(int64_t num_rows, const Rows& row) {
    const auto& [unplaced, length, stride] = row;
    if (!shares_memory()) {
      const Rows to{take(2 * num_rows * stride), length, stride};
      return {to, {to.begin(num_rows), length, stride}, to};
    }
    const int64_t begin = take(num_rows * stride);
    const int64_t rank = plan_.team->rank();
    return {{rank * region() + begin, length, stride},
            {begin + rank * stride, length, region()},
            {begin, length, region() + stride}};
  }

  // A row of each member's, which all get.
  Rows gather(int64_t length, int64_t stride) {
    const int64_t begin = take((shares_memory() ? 1 : plan_.team->size()) * stride);
    return {begin, length, shares_memory() ? region() : stride};
  }

  // Rows that this member alone fills.
  Rows own(int64_t num_rows, const Rows& row) {
    return {own_region() + take(num_rows * row.stride), row.length, row.stride};
  }
  // The first member's such rows, if they can be seen, else this one's.
  Rows of_first(const Rows& own) const { return {own.offset - own_region(), own.length, own.stride}; }

  // The piece's parts, so many values each, where place_of(member) says in bytes where each begins, from base on.
  static std::vector<Span> parts(const Piece& piece, int64_t part, DType dtype, int64_t base,
                                 const std::function<int64_t(int64_t)>& place_of) {
    std::vector<Span> spans;
    for (int64_t member = 0; piece.begin + member * part < piece.end; ++member) {
      const int64_t first = piece.begin + member * part;
      spans.push_back({first, std::min(first + part, piece.end), values_in(place_of(member) - base, dtype)});
    }
    return spans;
  }

  // The parts are packed into the first phase's rows.
  void pack_parts(Piece& piece, int64_t part) const {
    const Phase& phase = piece.phases.front();
    piece.packed_at = phase.to.offset;
    piece.packed =
        parts(piece, part, plan_.packed_as, piece.packed_at, [&](int64_t member) { return phase.place_for(member); });
  }

  // The parts are unpacked from the row of each member.
  void unpack_parts(Piece& piece, int64_t part, const Rows& rows) const {
    piece.wires = rows;
    piece.unpacked =
        parts(piece, part, bucket_.wire_dtype, rows.offset, [&](int64_t member) { return rows.begin(member); });
  }

  Plan done() && {
    plan_.bytes = round_up(used_, kRegionAlignment);
    plan_.num_side_rows = side_bytes_ > 0 ? plan_.num_side_rows : 0;
    return std::move(plan_);
  }

 private:
  bool shares_memory() const { return plan_.team->shares_memory(); }
  int64_t region() const { return plan_.team->region_bytes(); }
  int64_t own_region() const { return shares_memory() ? plan_.team->rank() * region() : 0; }
  int64_t take(int64_t bytes) { return std::exchange(used_, round_up(used_ + bytes, kRowAlignment)); }

  Plan plan_;
  int64_t num_parts_;
  const Bucket& bucket_;
  int64_t side_bytes_ = 0;
  int64_t used_ = 0;
};

Phase exchange(std::shared_ptr<Team> team, int tag, int64_t num_rows, const Rows& to, const Rows& from) {
  return {std::move(team), tag, /*is_gather=*/false, num_rows, to, from};
}

Phase gather(std::shared_ptr<Team> team, int tag, const Rows& rows) {
  const int64_t num_rows = team->size();
  return {std::move(team), tag, /*is_gather=*/true, num_rows, rows, rows};
}

}  // namespace

std::unique_ptr<Transfer> Phase::expect(const at::Tensor& memory) const {
  return is_gather ? team->all_gather(memory, to, tag) : team->all_to_all(memory, to, from, tag);
}

Plan one_shot(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket) {
  Planner planner(team, bucket.wire_dtype, /*num_parts=*/1, bucket);
  planner.add_pieces(bucket.num_values, planner.values_of_piece(/*in_shards=*/false), [&](Piece& piece) {
    const Rows row = planner.row_of(piece.end - piece.begin, bucket.wire_dtype, piece.position.is_last);
    const Rows rows = planner.gather(row.length, row.stride);
    piece.packed_at = rows.begin(team->rank());
    piece.packed = piece.unpacked = {{piece.begin, piece.end, /*place=*/0}};
    piece.wires = rows;
    piece.phases.push_back(gather(team, tag, rows));
    planner.plan().side_values = rows;
  });
  planner.plan().num_wires = planner.plan().num_side_rows = team->size();
  return std::move(planner).done();
}

Plan two_shot(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket) {
  const int64_t size = team->size();
  Planner planner(team, bucket.wire_dtype, /*num_parts=*/size, bucket);
  planner.add_pieces(bucket.num_values, planner.values_of_piece(/*in_shards=*/true), [&](Piece& piece) {
    const int64_t shard = planner.part_of(piece);
    auto [to, from, means] = planner.exchange(size, planner.row_of(shard, bucket.wire_dtype, piece.position.is_last));
    means.length = bytes_of(shard, bucket.wire_dtype);  // no side values travel with them
    piece.phases.push_back(exchange(team, tag, size, to, from));
    piece.phases.back().reduce = Reduce{bucket.wire_dtype,
                                        size,
                                        shard,
                                        {means.begin(team->rank())},
                                        bucket.share_of_row(size),
                                        piece.begin + team->rank() * shard,
                                        1.0 / static_cast<double>(size)};
    piece.phases.push_back(gather(team, tag + 1, means));
    planner.pack_parts(piece, shard);
    planner.unpack_parts(piece, shard, means);
    planner.plan().side_values = from;
  });
  planner.plan().num_side_rows = size;
  return std::move(planner).done();
}

Plan all_reduce(const std::shared_ptr<Team>& team, const Bucket& bucket, bool in_place) {
  Plan plan{team, bucket.wire_dtype};
  plan.is_all_reduce = true;
  plan.is_in_place = in_place && bucket.grads.size() == 1 && bucket.grad_dtype == bucket.wire_dtype;
  const bool has_room = bucket.side_bytes() > 0 && bucket.wire_dtype == DType::kFloat32 && !plan.is_in_place;
  plan.bytes = bytes_of(bucket.num_values, bucket.wire_dtype) + (has_room ? bucket.side_bytes() : 0);
  plan.side_values = {0, plan.bytes, 0};
  plan.num_side_rows = has_room ? 1 : 0;
  Piece& piece = plan.pieces.emplace_back(Piece{0, bucket.num_values});
  piece.packed = piece.unpacked = {{0, bucket.num_values, /*place=*/0}};
  piece.phases.push_back(gather(team, /*tag=*/0, plan.side_values));
  return plan;
}

Plan reduce_scatter(const std::shared_ptr<Team>& team, int tag, const Bucket& bucket, double factor) {
  const int64_t size = team->size();
  const int64_t shard = bucket.output.numel();
  Planner planner(team, bucket.wire_dtype, /*num_parts=*/size, bucket);
  const int64_t of_each = round_up(planner.values_of_piece(/*in_shards=*/true) / size, kBlockValues);
  planner.add_pieces(shard, of_each, [&](Piece& piece) {
    const int64_t values = round_up(piece.end - piece.begin, kBlockValues);
    const Exchange rows = planner.exchange(size, planner.row_of(values, bucket.wire_dtype, /*is_last=*/false));
    piece.phases.push_back(exchange(team, tag, size, rows.to, rows.from));
    piece.packed_at = rows.to.offset;
    for (int64_t member = 0; member < size; ++member) {
      const int64_t place = piece.phases.back().place_for(member) - rows.to.offset;
      piece.packed.push_back(
          {member * shard + piece.begin, member * shard + piece.end, values_in(place, bucket.wire_dtype)});
    }
    piece.wires = rows.from;
  });
  planner.plan().factor = factor;
  planner.plan().num_wires = size;
  return std::move(planner).done();
}

// Over ranks some of which are near each other: at full width inside a node, where links are fast, in the wire's dtype
// between nodes. The first ranks of a node have counterparts on all other nodes, with the same local rank.
//
//   in the node    local rank l gets shard l of everybody in its node, at full width, and adds it up
//   between nodes  in one step: that, encoded, goes to its counterparts, and is added by whoever unpacks it
//                  in two: node m's rank gets sub-shard m of every node's, adds it up, and hands it out, encoded anew
//   in the node    local rank l hands out all of shard l
//
// So one rounding at each sum that travels between nodes. In two steps each value crosses from node to node about
// twice, in one step once to each other node: by one rank of a node.
//
// A node's sum is divided by the ranks of the largest node, so that it is never beyond what its own ranks have. Times
// share_of_node, those of all nodes add up to the mean over the ranks.
Plan two_level(const Levels& levels, int tag, bool at_once, const Bucket& bucket) {
  // No structured binding, because clang before version 16 lets no lambda capture one.
  const int64_t nodes = levels.num_nodes, local_ranks = levels.num_local_ranks;
  const int64_t num_ranks = levels.num_ranks, most_ranks = levels.most_ranks;
  const std::shared_ptr<Team>& node = levels.node;
  const std::shared_ptr<Team>& peers = levels.peers;
  const DType wire = bucket.wire_dtype;
  const double share_of_node =
      bucket.rows_add_up ? 1.0 : static_cast<double>(most_ranks) / static_cast<double>(num_ranks);
  Planner planner(node, bucket.grad_dtype, /*num_parts=*/local_ranks * (at_once ? 1 : nodes), bucket);
  Plan& plan = planner.plan();
  planner.add_pieces(bucket.num_values, planner.values_of_piece(/*in_shards=*/true), [&](Piece& piece) {
    const bool is_last = piece.position.is_last;
    const int64_t sub_shard = planner.part_of(piece);
    const int64_t shard = (at_once ? 1 : nodes) * sub_shard;
    const int64_t begin = piece.begin + node->rank() * shard;
    const Rows encoded = planner.row_of(sub_shard, wire, is_last);
    const Exchange in_node = planner.exchange(local_ranks, planner.row_of(shard, bucket.grad_dtype, is_last));
    piece.phases.push_back(exchange(node, tag, local_ranks, in_node.to, in_node.from));
    std::vector<Phase> between;
    Rows to{}, from{};
    if (!at_once) {
      to = planner.own(nodes, encoded);
      from = planner.own(nodes, encoded);
    }
    const int64_t stride = at_once ? encoded.stride : bytes_of(sub_shard, wire);
    const Rows blocks = planner.gather(nodes * stride, nodes * stride);  // by local rank: what nodes have of its shard
    const Rows of_nodes{blocks.begin(node->rank()), at_once ? encoded.length : stride, stride};
    plan.side_values = at_once ? Rows{blocks.offset, encoded.length, stride} : planner.of_first(from);
    if (peers) {
      Reduce reduce{bucket.grad_dtype,
                    node->size(),
                    sub_shard,
                    {},
                    bucket.share_of_row(most_ranks),
                    begin,
                    1.0 / (static_cast<double>(num_ranks) * share_of_node),
                    /*adds_side_values=*/is_last};
      const int64_t own_row = of_nodes.begin(peers->rank());
      if (at_once) {
        reduce.outs = {own_row};
      } else {
        Phase& phase = between.emplace_back(exchange(peers, tag + 1, nodes, to, from));
        for (int64_t member = 0; member < nodes; ++member) {
          reduce.outs.push_back(phase.place_for(member));
        }
        phase.reduce = Reduce{wire,
                              nodes,
                              sub_shard,
                              {own_row},
                              share_of_node,
                              begin + peers->rank() * sub_shard,
                              1.0 / static_cast<double>(num_ranks)};
      }
      between.push_back(gather(peers, at_once ? tag + 1 : tag + 2, of_nodes));
      piece.phases.back().reduce = std::move(reduce);
    }
    std::move(between.begin(), between.end(), std::back_inserter(piece.phases));
    piece.phases.push_back(gather(node, tag + 3, blocks));
    for (Phase& phase : piece.phases) {
      phase.is_counted = phase.team == peers || !node->shares_memory();  // what stays in memory is not sent
    }
    planner.pack_parts(piece, shard);
    planner.unpack_parts(piece, shard, blocks);
    piece.wires.stride = stride;
  });
  plan.num_side_rows = nodes;
  if (at_once) {
    plan.num_wires = nodes;
    plan.factor = bucket.mean_factor * share_of_node;
  }
  return std::move(planner).done();
}

// At full width, with every gradient in blocks of its own, and each part of each piece rounded up.
int64_t most_bytes(const Bucket& bucket, int64_t num_parts) {
  constexpr int64_t kSideBytes = 4096;  // not every sync has all that may travel beside its gradients
  const int64_t width = unit_of(bucket.grad_dtype).bytes;
  int64_t bytes = 0;
  for (const at::Tensor& grad : bucket.grads) {
    bytes += round_up(grad.numel(), kBlockValues) * width;
  }
  const int64_t most_pieces = bytes / (kPieceBytes / 2) + 1;
  const int64_t most_rounding =
      part_multiple(DType::kInt8) * width + bytes_of(part_multiple(DType::kInt8), DType::kInt8) + 4 * kRowAlignment;
  return round_up(bytes + num_parts * (most_pieces * most_rounding + round_up(bucket.side_bytes() + 1, kSideBytes)),
                  kRegionAlignment) +
         kRegionAlignment;
}

// The gradients, and of a local rank's shard: in one step a row of each node, in two steps one to send, one that comes
// and one of means.
int64_t most_bytes(const Bucket& bucket, const Levels& levels, bool at_once) {
  const int64_t of_shard = most_bytes(bucket, levels.num_local_ranks * levels.num_nodes) / levels.num_local_ranks;
  return round_up(most_bytes(bucket, levels.num_local_ranks) + (at_once ? levels.num_nodes : 3) * of_shard,
                  kRegionAlignment);
}

}  // namespace fastsync
