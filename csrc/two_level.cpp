#include "two_level.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace fastsync {

namespace {

DType compute_dtype(DType grad) { return grad == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

}  // namespace

TwoLevelSum::TwoLevelSum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
                         int64_t ranks_per_node, Fp32Buffers& buffers)
    : BucketSum(std::move(group), device, std::move(bucket)),
      ranks_per_node_(ranks_per_node),
      num_nodes_(world_size_ / ranks_per_node),
      node_(rank_ / ranks_per_node),
      local_(rank_ % ranks_per_node) {
  lay_out(tag, buffers);
}

// ---- where everything lies ------------------------------------------------------------------------------------------

void TwoLevelSum::lay_out(int tag, Fp32Buffers& buffers) {
  const int64_t piece_values = values_per_piece(/*in_shards=*/true);
  int64_t offset = 0;
  int64_t place = 0;
  for (int64_t begin = 0; begin < num_values_; begin += piece_values) {
    const int64_t end = std::min(begin + piece_values, num_values_);
    const int64_t sub_shard =
        round_up((end - begin + world_size_ - 1) / world_size_, shard_multiple(bucket_.wire_dtype));
    const int64_t extras = end == num_values_ ? extra_bytes() : 0;
    const int64_t local_bytes = bytes_of(num_nodes_ * sub_shard, bucket_.grad_dtype) + extras;
    const int64_t local_stride = round_up(local_bytes, kMessageAlignment);
    const int64_t node_bytes = bytes_of(sub_shard, bucket_.wire_dtype) + extras;
    const int64_t node_stride = round_up(node_bytes, kMessageAlignment);
    const int64_t nodes = offset + 2 * ranks_per_node_ * local_stride;
    const int64_t sums = nodes + 2 * num_nodes_ * node_stride;
    pieces_.push_back({begin, end, sub_shard, offset, local_bytes, local_stride, nodes, node_bytes, node_stride, sums,
                       place, Exchange(group_, device_, tag), Exchange(group_, device_, tag + 1),
                       Exchange(group_, device_, tag + 2), Exchange(group_, device_, tag + 3)});
    offset = sums + round_up(world_size_ * bytes_of(sub_shard, bucket_.wire_dtype), kMessageAlignment);
    place += sub_shard;
  }
  // What lies beyond the last value, and on an int8 wire between gradients, is added like the rest: so, zeros.
  take(buffers, offset, {num_values_, static_cast<int64_t>(bucket_.wire_dtype), ranks_per_node_, offset});
}

// Of shard `local`, from sub-shard `node` on.
at::Tensor TwoLevelSum::sums_of(const Piece& piece, int64_t local, int64_t node, int64_t num_sub_shards) const {
  const int64_t length = bytes_of(piece.sub_shard, bucket_.wire_dtype);
  return bytes_.narrow(0, piece.sums + (local * num_nodes_ + node) * length, num_sub_shards * length);
}

std::vector<BucketSum::Owned> TwoLevelSum::owned() const {
  std::vector<Owned> owned;
  for (const Piece& piece : pieces_) {
    const int64_t begin = piece.begin + local_ * shard(piece) + node_ * piece.sub_shard;
    own(owned, begin, std::min(begin + piece.sub_shard, piece.end), piece.place);
  }
  return owned;
}

int64_t TwoLevelSum::num_owned() const { return pieces_.back().place + pieces_.back().sub_shard; }

// ---- one sum --------------------------------------------------------------------------------------------------------

void TwoLevelSum::send() {
  for (Piece& piece : pieces_) {
    for (int64_t step = 1; step < ranks_per_node_; ++step) {
      const int64_t peer = (local_ + step) % ranks_per_node_;
      piece.gather.expect(bytes_.narrow(0, local_offset(piece, ranks_per_node_ + peer), piece.local_bytes),
                          rank_of(node_, peer));
    }
  }
  for (Piece& piece : pieces_) {
    pack(piece);
    send_to_peers(piece);
  }
  if (device_.is_cpu()) {
    return;
  }
  beside_backward([this] {
    for (Piece& piece : pieces_) {
      piece.gather.start();
    }
    drive();
  });
}

// Slot l is for local peer l; slot ranks_per_node + l is what came from there, and this rank's own part.
void TwoLevelSum::pack(const Piece& piece) {
  RECORD_FUNCTION("fastsync::pack", {});
  std::vector<Segment> all;
  for (int64_t local = 0; local < ranks_per_node_; ++local) {
    const int64_t begin = piece.begin + local * shard(piece);
    const int64_t offset = packing_slot(local) * piece.local_stride / size_of(bucket_.grad_dtype);
    const auto parts = cut(begin, std::min(begin + shard(piece), piece.end), offset);
    all.insert(all.end(), parts.begin(), parts.end());
  }
  if (is_last(piece)) {  // to this rank's own slot for nothing
    put_extras(local_offset(piece, 0) + piece.local_bytes, piece.local_stride, ranks_per_node_);
    put_extras(local_offset(piece, packing_slot(local_)) + piece.local_bytes, piece.local_stride, 1);
  }
  BucketSum::pack(all, bucket_.grad_dtype, address(piece.local), {piece.begin == 0, is_last(piece)}, /*seed=*/0);
}

void TwoLevelSum::send_to_peers(Piece& piece) {
  for (int64_t step = 1; step < ranks_per_node_; ++step) {
    const int64_t peer = (local_ + step) % ranks_per_node_;
    piece.gather.send(bytes_.narrow(0, local_offset(piece, peer), piece.local_bytes), rank_of(node_, peer));
  }
}

// Step by step for all pieces, so that the pieces of one step are on their way together.
void TwoLevelSum::drive_all() {
  // Made here, for it is used on the stream that is current here, and is that stream's to use again.
  if (compute_dtype(bucket_.grad_dtype) != bucket_.grad_dtype && bucket_.wire_dtype != bucket_.grad_dtype) {
    unencoded_ = at::empty({pieces_.front().sub_shard}, bytes_.options().dtype(at::kFloat));
  }
  for (Piece& piece : pieces_) {
    piece.gather.wait();
    reduce_in_node(piece);
    send_to_nodes(piece);
  }
  for (Piece& piece : pieces_) {
    piece.cross.wait();
    reduce_between_nodes(piece);
    collect(piece);
  }
  for (Piece& piece : pieces_) {
    piece.collect.wait();
    spread(piece);
  }
}

void TwoLevelSum::reduce_in_node(const Piece& piece) {
  RECORD_FUNCTION("fastsync::reduce", {});
  if (is_last(piece)) {
    sum_extras(local_offset(piece, ranks_per_node_) + piece.local_bytes, piece.local_stride, ranks_per_node_);
  }
  at::Tensor lost;
  if (!own_residuals_.empty()) {
    lost = at::zeros({shard(piece)}, own_residuals_.front().options());
  }
  for (int64_t node = 0; node < num_nodes_; ++node) {
    const int64_t first = node * piece.sub_shard;
    const int64_t out = node_offset(piece, node == node_ ? num_nodes_ + node : node);
    // Even seeds here, odd ones for the sums over nodes.
    ReduceArgs args = mean(address(local_offset(piece, ranks_per_node_) + first * size_of(bucket_.grad_dtype)),
                           bucket_.grad_dtype, ranks_per_node_, piece.local_stride, piece.sub_shard, address(out),
                           bucket_.wire_dtype, 2 * static_cast<uint64_t>(piece.begin + first));
    if (lost.defined()) {
      args.residual = lost.narrow(0, first, piece.sub_shard).data_ptr();
    }
    encode_node_sum(args);
  }
  if (is_last(piece)) {  // to this node's own slot for nothing
    put_extras(node_offset(piece, 0) + piece.node_bytes, piece.node_stride, num_nodes_);
    put_extras(node_offset(piece, num_nodes_ + node_) + piece.node_bytes, piece.node_stride, 1);
  }
  if (lost.defined()) {
    keep_for_next_step(piece, lost);
  }
}

void TwoLevelSum::encode_node_sum(ReduceArgs args) {
  if (unencoded_.defined()) {
    ReduceArgs sum = args;
    sum.out = unencoded_.data_ptr();
    sum.out_dtype = DType::kFloat32;
    sum.residual = nullptr;
    run_reduce(sum, device_);
    args.wire = sum.out;
    args.wire_dtype = sum.out_dtype;
    args.num_wires = 1;
    args.multiplier = 1.0;
  }
  run_reduce(args, device_);
}

// Also of a gradient that this rank does not have, but others of its node.
void TwoLevelSum::keep_for_next_step(const Piece& piece, const at::Tensor& lost) {
  const int64_t begin = piece.begin + local_ * shard(piece);
  std::vector<Owned> parts;
  own(parts, begin, std::min(begin + shard(piece), piece.end), /*place=*/0);
  for (const Owned& part : parts) {
    own_residuals_[part.segment]
        .narrow(0, part.first, part.count)
        .add_(lost.narrow(0, part.place, part.count), static_cast<double>(ranks_per_node_));
  }
}

// Slot m is for node m; slot num_nodes + m is what came from there, and this node's own part.
void TwoLevelSum::send_to_nodes(Piece& piece) {
  for (int64_t step = 1; step < num_nodes_; ++step) {
    const int64_t node = (node_ + step) % num_nodes_;
    piece.cross.expect(bytes_.narrow(0, node_offset(piece, num_nodes_ + node), piece.node_bytes),
                       rank_of(node, local_));
  }
  for (int64_t step = 1; step < num_nodes_; ++step) {
    const int64_t node = (node_ + step) % num_nodes_;
    piece.cross.send(bytes_.narrow(0, node_offset(piece, node), piece.node_bytes), rank_of(node, local_));
  }
  piece.cross.start();
}

void TwoLevelSum::reduce_between_nodes(const Piece& piece) {
  RECORD_FUNCTION("fastsync::reduce", {});
  if (is_last(piece)) {
    sum_extras(node_offset(piece, num_nodes_) + piece.node_bytes, piece.node_stride, num_nodes_);
  }
  ReduceArgs args =
      mean(address(node_offset(piece, num_nodes_)), bucket_.wire_dtype, num_nodes_, piece.node_stride, piece.sub_shard,
           sums_of(piece, local_, node_, 1).data_ptr(), bucket_.wire_dtype, 2 * static_cast<uint64_t>(piece.begin) + 1);
  if (residual_.defined()) {
    args.residual = residual_.narrow(0, piece.place, piece.sub_shard).data_ptr();
  }
  run_reduce(args, device_);
}

void TwoLevelSum::collect(Piece& piece) {
  for (int64_t step = 1; step < num_nodes_; ++step) {
    const int64_t node = (node_ + step) % num_nodes_;
    piece.collect.expect(sums_of(piece, local_, node, 1), rank_of(node, local_));
  }
  for (int64_t step = 1; step < num_nodes_; ++step) {
    piece.collect.send(sums_of(piece, local_, node_, 1), rank_of((node_ + step) % num_nodes_, local_));
  }
  piece.collect.start();
}

void TwoLevelSum::spread(Piece& piece) {
  for (int64_t step = 1; step < ranks_per_node_; ++step) {
    const int64_t peer = (local_ + step) % ranks_per_node_;
    piece.spread.expect(sums_of(piece, peer, 0, num_nodes_), rank_of(node_, peer));
  }
  for (int64_t step = 1; step < ranks_per_node_; ++step) {
    piece.spread.send(sums_of(piece, local_, 0, num_nodes_), rank_of(node_, (local_ + step) % ranks_per_node_));
  }
  piece.spread.start();
}

void TwoLevelSum::receive(Stopwatch& stopwatch) {
  for (Piece& piece : pieces_) {
    piece.spread.wait();
    if (is_last(piece)) {
      stopwatch.mark(Mark::kReduced);
    }
    unpack(cut(piece.begin, piece.end, 0), address(piece.sums), /*num_wires=*/1, /*stride=*/0,
           {piece.begin == 0, is_last(piece)});
  }
}

int64_t TwoLevelSum::sent_bytes() const {
  int64_t sum = 0;
  for (const Piece& piece : pieces_) {
    for (const Exchange* exchange : {&piece.gather, &piece.cross, &piece.collect, &piece.spread}) {
      sum += exchange->sent_bytes();
    }
  }
  return sum;
}

}  // namespace fastsync
