// The sum of one bucket over ranks that share nodes, as two_shot over two teams: at full width inside a node, where
// links are fast, in the wire's dtype between nodes. Rank node * L + local is the local-th of the node's L ranks; M is
// the number of nodes.
//
//   in node        local peer l gets shard l of everybody in its node, at full width, and adds it up in float32
//   between nodes  of that, encoded, node m's rank of the same l gets sub-shard m of every node, and adds it up
//   collect        encoded anew, it goes to the other nodes' ranks of the same l, which then have all of shard l
//   spread         and from them to the local peers
//
// So one rounding at each of the two sums, and each value crosses from node to node about twice, by one rank of a node.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "sums/rank_sum.h"

namespace fastsync {

namespace {

class TwoLevelSum final : public RankSum {
 public:
  TwoLevelSum(std::shared_ptr<Team> team, int tag, int64_t ranks_per_node, Bucket bucket, SumBuffers& buffers)
      : RankSum(std::move(team), std::move(bucket)),
        tag_(tag),
        node_(team_->part(team_->rank() / ranks_per_node * ranks_per_node, 1, ranks_per_node)),
        peers_(team_->part(team_->rank() % ranks_per_node, ranks_per_node, team_->size() / ranks_per_node)) {
    const DType wire = bucket_.wire_dtype;
    int64_t offset = 0;
    int64_t place = 0;
    for_each_piece(/*in_shards=*/true, [&](const Span& span) {
      const int64_t sub_shard = part_of(span);
      const int64_t shard = peers_->size() * sub_shard;
      const auto scatter = [&](const std::shared_ptr<Team>& level, int level_tag, const Rows& to) {
        const Rows from{to.begin(level->size()), to.length, to.stride};
        offset = from.begin(level->size());
        return ReduceScatter{level, level_tag, to, from, nullptr};
      };
      auto in_node = scatter(node_, tag_, rows_of(offset, shard, bucket_.grad_dtype, span.turn.is_last));
      auto between = scatter(peers_, tag_ + 1, rows_of(offset, sub_shard, wire, span.turn.is_last));
      const Rows means{offset, bytes_of(shard, wire), bytes_of(shard, wire)};
      const Rows nodes_means{means.begin(node_->rank()), bytes_of(sub_shard, wire), bytes_of(sub_shard, wire)};
      offset = round_up(means.begin(node_->size()), kRowAlignment);
      pieces_.push_back({span, shard, sub_shard, place, std::move(in_node), std::move(between), nodes_means, means,
                         nullptr, nullptr});
      place += sub_shard;
    });
    take(buffers, offset, /*kind=*/-ranks_per_node);
  }

  // Of the sums over all nodes. What encoding a node's sum loses becomes part of the gradients' own residuals on the
  // rank that encoded it, once for each rank of the node, for it is part of a mean over so many.
  Owned owned() const override {
    Owned owned{{}, pieces_.back().place + pieces_.back().sub_shard};
    for (const Piece& piece : pieces_) {
      const int64_t begin = piece.begin + node_->rank() * piece.shard + peers_->rank() * piece.sub_shard;
      bucket_.own(owned, begin, std::min(begin + piece.sub_shard, piece.end), piece.place);
    }
    return owned;
  }

  void send() override {
    for (Piece& piece : pieces_) {
      piece.in_node.expect(memory_);
    }
    for (Piece& piece : pieces_) {
      pack_parts(piece.in_node, piece, piece.shard, bucket_.grad_dtype, /*seed=*/0);
      piece.in_node.transfer->send();
    }
  }

  bool needs_driving() const override { return true; }

 private:
  struct Piece : Span {
    int64_t shard;  // of a rank of a node; this and the next in values
    int64_t sub_shard;
    int64_t place;  // in values, in the residual
    ReduceScatter in_node;
    ReduceScatter between_nodes;
    Rows nodes_means;  // of this rank's shard, by node: where it lies among the next
    Rows means;        // by local rank, in the order of the values
    std::unique_ptr<Transfer> collect;
    std::unique_ptr<Transfer> spread;
  };

  // Step by step for all pieces, so that the pieces of one step are on their way together.
  void drive_all() override {
    // Made here, for it is used on the stream that is current here, and is that stream's to use again.
    if (size_of(bucket_.grad_dtype) < size_of(DType::kFloat32) && bucket_.wire_dtype != bucket_.grad_dtype) {
      unencoded_ = at::empty({pieces_.front().sub_shard}, memory_.options().dtype(at::kFloat));
    }
    for (Piece& piece : pieces_) {
      wait_for(*piece.in_node.transfer);
      reduce_in_node(piece);
      piece.between_nodes.expect(memory_);
      piece.between_nodes.transfer->send();
    }
    for (Piece& piece : pieces_) {
      const Rows& from = piece.between_nodes.from;
      wait_for(*piece.between_nodes.transfer);
      if (piece.turn.is_last) {
        sum_extras(from, peers_->size());
      }
      reduce(from, peers_->size(), piece.sub_shard, piece.nodes_means.begin(peers_->rank()), piece.place,
             2 * static_cast<uint64_t>(piece.begin) + 1);
      piece.collect = peers_->all_gather(memory_, piece.nodes_means, tag_ + 2);
      piece.collect->send();
    }
    for (Piece& piece : pieces_) {
      wait_for(*piece.collect);
      piece.spread = node_->all_gather(memory_, piece.means, tag_ + 3);
      piece.spread->send();
    }
  }

  void reduce_in_node(const Piece& piece) {
    RECORD_FUNCTION("fastsync::reduce", {});
    const Rows& from = piece.in_node.from;
    if (piece.turn.is_last) {
      sum_extras(from, node_->size());
      put_extras(piece.between_nodes);
    }
    at::Tensor lost;
    if (bucket_.keeps_losses) {
      lost = at::zeros({piece.shard}, bucket_.residuals.front().options());
    }
    for (int64_t node = 0; node < peers_->size(); ++node) {
      const int64_t first = node * piece.sub_shard;
      // Even seeds here, odd ones for the sums over nodes.
      ReduceArgs args = bucket_.mean(
          address(from.offset + first * size_of(bucket_.grad_dtype)), bucket_.grad_dtype, node_->size(), from.stride,
          piece.sub_shard, address(piece.between_nodes.place_of(node)), 2 * static_cast<uint64_t>(piece.begin + first));
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

  // Also of a gradient that this rank does not have, but others of its node.
  void keep_for_next_step(const Piece& piece, const at::Tensor& lost) const {
    const int64_t begin = piece.begin + node_->rank() * piece.shard;
    Owned owned;
    bucket_.own(owned, begin, std::min(begin + piece.shard, piece.end), /*place=*/0);
    for (const Owned::Part& part : owned.parts) {
      bucket_.residuals[part.segment]
          .narrow(0, part.first, part.count)
          .add_(lost.narrow(0, part.place, part.count), static_cast<double>(node_->size()));
    }
  }

  void receive(const std::function<void()>& on_reduced) override {
    for (const Piece& piece : pieces_) {
      wait_for(*piece.spread);
      if (piece.turn.is_last) {
        on_reduced();
      }
      bucket_.unpack(bucket_.cut(piece.begin, piece.end, 0), address(piece.means.offset), /*num_wires=*/1,
                     /*stride=*/0, piece.turn);
    }
  }

  int tag_;
  std::shared_ptr<Team> node_;   // this rank's
  std::shared_ptr<Team> peers_;  // on the other nodes
  at::Tensor unencoded_;         // a node's sums, where no pass leads from the gradients' dtype to the wire's at once
  std::vector<Piece> pieces_;
};

}  // namespace

std::unique_ptr<BucketSum> two_level_sum(std::shared_ptr<Team> team, int tag, int64_t ranks_per_node, Bucket bucket,
                                         SumBuffers& buffers) {
  return std::make_unique<TwoLevelSum>(std::move(team), tag, ranks_per_node, std::move(bucket), buffers);
}

}  // namespace fastsync
