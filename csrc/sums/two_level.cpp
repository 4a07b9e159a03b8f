// The sum of one bucket over ranks some of which are near each other: at full width inside a node, where links are
// fast, in the wire's dtype between nodes. A node's first ranks have a lane each, with their counterparts on the other
// nodes.
//
//   in node        the lane's rank gets shard l of everybody in its node, at full width, and adds it up in float32
//   between nodes  in one step: that, encoded, goes to its counterparts, and is added by whoever unpacks it
//                  in two: node m's rank gets sub-shard m of every node's, adds it up, and hands it out, encoded anew
//   spread         the lane's rank then has all of shard l, for everybody in its node
//
// So one rounding at each sum that travels between nodes. In two steps each value crosses from node to node about
// twice, in one step once to each other node: by one rank of a node.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "sums/rank_sum.h"

namespace fastsync {

namespace {

class TwoLevelSum final : public RankSum {
 public:
  TwoLevelSum(const Levels& levels, int tag, bool at_once, Bucket bucket, SumBuffers& buffers)
      : RankSum(levels.node, levels.num_lanes * (at_once ? 1 : levels.num_nodes), std::move(bucket)),
        levels_(levels),
        tag_(tag),
        at_once_(at_once) {
    place(buffers, /*kind=*/-2 * levels.node->size() - (at_once ? 1 : 0), [this](Regions& regions) {
      pieces_.clear();
      num_owned_ = 0;
      for_each_piece(/*in_shards=*/true, [&](const Span& span) { lay_out(span, regions); });
    });
  }

  // Of the sums over all nodes. What encoding a node's sum loses becomes part of the gradients' own residuals on the
  // rank that encoded it.
  Owned owned() const override {
    if (at_once_ || !levels_.peers) {
      return {};
    }
    Owned owned{{}, num_owned_};
    for (const Piece& piece : pieces_) {
      const int64_t begin = begin_of_lane(piece) + levels_.peers->rank() * piece.sub_shard;
      bucket_.own(owned, begin, std::min(begin + piece.sub_shard, piece.end), piece.place);
    }
    return owned;
  }

  void send() override {
    for (Piece& piece : pieces_) {
      piece.in_node.expect(memory_);
      if (levels_.peers) {
        expect_from_nodes(piece);
      }
    }
    for (Piece& piece : pieces_) {
      send_packed(
          *piece.in_node.transfer,
          [&] { pack_parts(piece.in_node, piece, piece.shard, bucket_.grad_dtype, /*seed=*/0); },
          [&] { fill_with_nan(piece.in_node); });
    }
  }

  bool needs_driving() const override { return true; }

 private:
  struct Piece : Span {
    int64_t shard;  // of a lane; this and the next in values
    int64_t sub_shard;
    int64_t place;  // in values, in the residual
    ReduceScatter in_node;
    ReduceScatter between_nodes;         // in two steps
    Rows of_nodes;                       // by node: of this lane, the sums in one step, the means in two
    Rows blocks;                         // by lane: those
    Rows extras;                         // where all see them, by node
    std::unique_ptr<Transfer> to_nodes;  // of the sums in one step, of the means in two
    std::unique_ptr<Transfer> spread;
  };

  void lay_out(const Span& span, Regions& regions) {
    const DType wire = bucket_.wire_dtype;
    const int64_t nodes = levels_.num_nodes;
    const int64_t sub_shard = part_of(span);
    const int64_t shard = (at_once_ ? 1 : nodes) * sub_shard;
    const Rows full = row_of(shard, bucket_.grad_dtype, span.turn.is_last);
    const Rows encoded = row_of(sub_shard, wire, span.turn.is_last);
    const Exchange in_node = regions.exchange(levels_.num_lanes, full.length, full.stride);
    Piece piece{span,
                shard,
                sub_shard,
                num_owned_,
                {levels_.node, levels_.num_lanes, tag_, in_node.to, in_node.from, nullptr},
                {},
                {},
                {},
                {},
                nullptr,
                nullptr};
    int64_t stride = encoded.stride;
    if (at_once_) {
      piece.blocks = regions.gather(nodes * stride, nodes * stride);
      piece.extras = {piece.blocks.offset, encoded.length, stride};
    } else {
      const Rows to = regions.own(nodes, encoded.length, stride);
      const Rows from = regions.own(nodes, encoded.length, stride);
      piece.between_nodes = {levels_.peers, nodes, tag_ + 1, to, from, nullptr};
      piece.extras = regions.of_first(from);
      stride = bytes_of(sub_shard, wire);
      piece.blocks = regions.gather(nodes * stride, nodes * stride);
    }
    piece.of_nodes = {piece.blocks.begin(levels_.node->rank()), at_once_ ? encoded.length : stride, stride};
    num_owned_ += sub_shard;
    pieces_.push_back(std::move(piece));
  }

  int64_t begin_of_lane(const Piece& piece) const { return piece.begin + levels_.node->rank() * piece.shard; }

  void expect_from_nodes(Piece& piece) {
    if (at_once_) {
      piece.to_nodes = levels_.peers->all_gather(memory_, piece.of_nodes, tag_ + 1);
    } else {
      piece.between_nodes.expect(memory_);
    }
  }

  // Step by step for all pieces, so that the pieces of one step are on their way together.
  void drive_all() override {
    if (levels_.peers) {
      add_in_node();
      if (!at_once_) {
        add_nodes();
      }
    }
    for (Piece& piece : pieces_) {
      if (levels_.peers) {
        wait_for_rows(*piece.to_nodes);
      }
      piece.spread = levels_.node->all_gather(memory_, piece.blocks, tag_ + 3);
      piece.spread->send();
    }
  }

  void add_in_node() {
    // Made here, for it is used on the stream that is current here, and is that stream's to use again.
    if (size_of(bucket_.grad_dtype) < size_of(DType::kFloat32) && bucket_.wire_dtype != bucket_.grad_dtype) {
      unencoded_ = at::empty({pieces_.front().sub_shard}, memory_.options().dtype(at::kFloat));
    }
    for (Piece& piece : pieces_) {
      wait_in_node(*piece.in_node.transfer);
      reduce_in_node(piece);
      (at_once_ ? piece.to_nodes : piece.between_nodes.transfer)->send();
    }
  }

  void add_nodes() {
    for (Piece& piece : pieces_) {
      wait_for_rows(*piece.between_nodes.transfer);
      reduce(piece.between_nodes.from, levels_.num_nodes, piece.sub_shard, own_row(piece), piece.place,
             2 * static_cast<uint64_t>(piece.begin) + 1, share_of_node());
      piece.to_nodes = levels_.peers->all_gather(memory_, piece.of_nodes, tag_ + 2);
      piece.to_nodes->send();
    }
  }

  // What stays in memory is not sent.
  void wait_in_node(Transfer& transfer) {
    transfer.wait_for_rows();
    sent_bytes_ += levels_.node->shares_memory() ? 0 : transfer.sent_bytes();
  }

  // A node's sum is divided by the ranks of the largest node, so that it is never beyond what its own ranks have; times
  // this, those of all nodes add up to the mean over the ranks.
  double share_of_node() const {
    return bucket_.rows_add_up ? 1.0 : static_cast<double>(levels_.most_ranks) / static_cast<double>(levels_.num_ranks);
  }

  int64_t own_row(const Piece& piece) const { return piece.of_nodes.begin(levels_.peers->rank()); }

  void reduce_in_node(const Piece& piece) {
    RECORD_FUNCTION("fastsync::reduce", {});
    const Rows& from = piece.in_node.from;
    if (piece.turn.is_last) {
      sum_extras(from, levels_.node->size());
      if (at_once_) {
        put_extras(piece.of_nodes, levels_.peers->rank(), 1);
      } else {
        put_extras(piece.between_nodes);
      }
    }
    at::Tensor lost;
    if (bucket_.keeps_losses) {
      lost = at::zeros({piece.shard}, bucket_.residuals.front().options());
    }
    for (int64_t first = 0; first < piece.shard; first += piece.sub_shard) {
      const int64_t out = at_once_ ? own_row(piece) : piece.between_nodes.place_of(first / piece.sub_shard);
      // Even seeds here, odd ones for the sums over nodes.
      ReduceArgs args =
          bucket_.mean(address(from.offset + first * size_of(bucket_.grad_dtype)), bucket_.grad_dtype,
                       levels_.node->size(), from.stride, piece.sub_shard, address(out),
                       2 * static_cast<uint64_t>(piece.begin + first), bucket_.share_of_row(levels_.most_ranks));
      if (lost.defined()) {
        args.residual = lost.narrow(0, first, piece.sub_shard).data_ptr();
      }
      encode_node_sum(args);
    }
    if (lost.defined()) {
      keep_for_next_step(piece, lost);
    }
  }

  void encode_node_sum(ReduceArgs args) const {
    if (unencoded_.defined()) {
      ReduceArgs sum = args;
      sum.out = unencoded_.data_ptr();
      sum.out_dtype = DType::kFloat32;
      sum.residual = nullptr;
      run_reduce(sum, bucket_.device);
      args.wire = sum.out;
      args.wire_dtype = sum.out_dtype;
      args.num_wires = 1;
      args.multiplier = 1.0;
    }
    run_reduce(args, bucket_.device);
  }

  // Also of a gradient that this rank does not have, but others of its node. A loss counts in the mean as much as a
  // gradient of each rank of the largest node.
  void keep_for_next_step(const Piece& piece, const at::Tensor& lost) const {
    const int64_t begin = begin_of_lane(piece);
    const double share = static_cast<double>(levels_.num_ranks) * share_of_node();
    Owned owned;
    bucket_.own(owned, begin, std::min(begin + piece.shard, piece.end), /*place=*/0);
    for (const Owned::Part& part : owned.parts) {
      bucket_.residuals[part.segment]
          .narrow(0, part.first, part.count)
          .add_(lost.narrow(0, part.place, part.count), share);
    }
  }

  void receive(const std::function<void()>& on_reduced) override {
    for (const Piece& piece : pieces_) {
      wait_in_node(*piece.spread);
      if (piece.turn.is_last) {
        sum_extras(piece.extras, levels_.num_nodes);
        on_reduced();
      }
      const auto place_of = [&](int64_t lane) { return piece.blocks.begin(lane); };
      bucket_.unpack(parts(piece, piece.shard, bucket_.wire_dtype, piece.blocks.offset, place_of),
                     address(piece.blocks.offset), at_once_ ? levels_.num_nodes : 1, piece.of_nodes.stride, piece.turn,
                     at_once_ ? std::optional(bucket_.mean_factor * share_of_node()) : std::nullopt);
    }
    for (const Piece& piece : pieces_) {
      for (Transfer* sent : {piece.in_node.transfer.get(), piece.between_nodes.transfer.get(), piece.to_nodes.get()}) {
        if (sent != nullptr) {
          sent->wait_until_sent();
        }
      }
      piece.spread->wait_until_sent();
    }
    release();
  }

  Levels levels_;
  int tag_;
  bool at_once_;
  int64_t num_owned_ = 0;  // in values, of the sums over all nodes
  at::Tensor unencoded_;   // a node's sums, where no pass leads from the gradients' dtype to the wire's at once
  std::vector<Piece> pieces_;
};

}  // namespace

std::unique_ptr<BucketSum> two_level_sum(const Levels& levels, int tag, bool at_once, Bucket bucket,
                                         SumBuffers& buffers) {
  return std::make_unique<TwoLevelSum>(levels, tag, at_once, std::move(bucket), buffers);
}

// The gradients, and of a lane's: in one step a row of each node, in two one to send, one that comes and one of means.
int64_t most_bytes_on_two_levels(const Bucket& bucket, const Levels& levels, bool at_once) {
  const int64_t of_lane = RankSum::most_bytes(bucket, levels.num_lanes * levels.num_nodes) / levels.num_lanes;
  return RankSum::most_bytes(bucket, levels.num_lanes) + (at_once ? levels.num_nodes : 3) * of_lane;
}

}  // namespace fastsync
