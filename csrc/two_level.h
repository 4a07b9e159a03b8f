// The sum of one bucket over ranks that share nodes: at full width inside a node, where links are fast, in the wire's
// dtype between nodes. Rank node * L + local is the local-th of the node's L ranks; M is the number of nodes.
//
//   gather   local peer l gets shard l of everybody in its node, at full width, and adds it up in float32
//   cross    of that, encoded, node m's rank of the same l gets sub-shard m of every node, and adds it up
//   collect  encoded anew, it goes to the other nodes' ranks of the same l, which then have all of shard l
//   spread   and from them to the local peers
//
// So one rounding at each of the two sums, and each value crosses from node to node about twice, by one rank of a node.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "bucket_sum.h"
#include "exchange.h"

namespace fastsync {

class TwoLevelSum final : public BucketSum {
 public:
  // ranks_per_node divides the number of ranks, and is less.
  TwoLevelSum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
              int64_t ranks_per_node, Fp32Buffers& buffers);

  // Of the sums over all nodes. What encoding a node's sum loses becomes part of the gradients' own residuals on the
  // rank that encoded it, ranks_per_node times, for it is part of a mean over so many.
  std::vector<Owned> owned() const override;
  int64_t num_owned() const override;
  void send() override;
  int64_t sent_bytes() const override;

 private:
  // Three rows of messages: to local peers and from them, at full width; to nodes and from them, encoded; and the sums
  // of all sub-shards, one after the other.
  struct Piece {
    int64_t begin;  // in values
    int64_t end;
    int64_t sub_shard;    // in values: a multiple of kBlockValues
    int64_t local;        // in bytes: where to local peers, then from them
    int64_t local_bytes;  // of one
    int64_t local_stride;
    int64_t nodes;  // in bytes: where to nodes, then from them
    int64_t node_bytes;
    int64_t node_stride;
    int64_t sums;   // in bytes: where the sums lie
    int64_t place;  // in values, in the residual
    Exchange gather;
    Exchange cross;
    Exchange collect;
    Exchange spread;
  };

  void lay_out(int tag, Fp32Buffers& buffers);
  bool is_last(const Piece& piece) const { return piece.end == num_values_; }
  int64_t shard(const Piece& piece) const { return num_nodes_ * piece.sub_shard; }
  int64_t rank_of(int64_t node, int64_t local) const { return node * ranks_per_node_ + local; }
  int64_t local_offset(const Piece& piece, int64_t slot) const { return piece.local + slot * piece.local_stride; }
  int64_t node_offset(const Piece& piece, int64_t slot) const { return piece.nodes + slot * piece.node_stride; }
  int64_t packing_slot(int64_t local) const { return local == local_ ? ranks_per_node_ + local : local; }
  at::Tensor sums_of(const Piece& piece, int64_t local, int64_t node, int64_t num_sub_shards) const;

  void pack(const Piece& piece);
  void reduce_in_node(const Piece& piece);
  void encode_node_sum(ReduceArgs args);
  void keep_for_next_step(const Piece& piece, const at::Tensor& lost);
  void reduce_between_nodes(const Piece& piece);
  void send_to_peers(Piece& piece);
  void send_to_nodes(Piece& piece);
  void collect(Piece& piece);
  void spread(Piece& piece);
  void drive_all() override;
  void receive(Stopwatch& stopwatch) override;

  int64_t ranks_per_node_;
  int64_t num_nodes_;
  int64_t node_;
  int64_t local_;
  at::Tensor unencoded_;  // a node's sums, where no pass leads from the gradients' dtype to the wire's at once
  std::vector<Piece> pieces_;
};

}  // namespace fastsync
