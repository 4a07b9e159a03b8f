#include "fp32_reduce.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

namespace fastsync {

Fp32Sum::Fp32Sum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
                 Fp32Buffers& buffers)
    : BucketSum(std::move(group), device, std::move(bucket)) {
  lay_out(tag, buffers);
}

// ---- where everything lies ------------------------------------------------------------------------------------------

void Fp32Sum::lay_out(int tag, Fp32Buffers& buffers) {
  const DType dtype = bucket_.wire_dtype;
  const int64_t num_slots = is_one_shot() ? world_size_ : 2 * world_size_;
  const int64_t multiple = shard_multiple(dtype);
  const int64_t alignment = dtype == DType::kInt8 ? bytes_of(multiple, dtype) : kMessageAlignment;
  const int64_t piece_values = values_per_piece(/*in_shards=*/!is_one_shot());

  int64_t offset = 0;
  int64_t shard_offset = 0;
  for (int64_t begin = 0; begin < num_values_; begin += piece_values) {
    const int64_t end = std::min(begin + piece_values, num_values_);
    const int64_t shard =
        is_one_shot() ? end - begin : round_up((end - begin + world_size_ - 1) / world_size_, multiple);
    const int64_t length = end == num_values_ && extra_bytes() > 0
                               ? round_up(bytes_of(shard, dtype), sizeof(float)) + extra_bytes()
                               : bytes_of(shard, dtype);
    const int64_t stride = round_up(length, alignment);
    pieces_.push_back({begin, end, shard, offset, length, stride, shard_offset, Exchange(group_, device_, tag),
                       Exchange(group_, device_, tag + 1)});
    offset += num_slots * stride;
    shard_offset += shard;
  }
  // Shards may end beyond the last value. What lies there is added like the rest, so it has to be zeros.
  take(buffers, offset, {num_values_, static_cast<int64_t>(dtype), num_slots, extra_bytes()});
}

at::Tensor Fp32Sum::message(const Piece& piece, int64_t slot) const {
  return bytes_.narrow(0, offset_of(piece, slot), piece.length);
}

// As message, of two_shot's second half, in which no extras travel.
at::Tensor Fp32Sum::sums_message(const Piece& piece, int64_t slot) const {
  return bytes_.narrow(0, offset_of(piece, slot), bytes_of(piece.shard, bucket_.wire_dtype));
}

int64_t Fp32Sum::packing_slot(int64_t rank) const { return rank == rank_ ? world_size_ + rank_ : rank; }

// one_shot: a piece is one message, and slot r is rank r's. two_shot: slot j is for rank j, first its shard as it goes
// there and then the sums that come from there; slot world_size + r is what came from rank r of this rank's own shard,
// where its own part is packed at once.
std::vector<Segment> Fp32Sum::segments_of(const Piece& piece, bool is_packing) const {
  if (is_one_shot()) {
    return cut(piece.begin, piece.end, 0);
  }
  std::vector<Segment> all;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    const int64_t slot = is_packing ? packing_slot(rank) : rank;
    const int64_t begin = piece.begin + rank * piece.shard;
    const auto parts =
        cut(begin, std::min(begin + piece.shard, piece.end), values_in(slot * piece.stride, bucket_.wire_dtype));
    all.insert(all.end(), parts.begin(), parts.end());
  }
  return all;
}

std::vector<BucketSum::Owned> Fp32Sum::owned() const {
  std::vector<Owned> owned;
  for (const Piece& piece : pieces_) {
    const int64_t begin = piece.begin + rank_ * piece.shard;
    own(owned, begin, std::min(begin + piece.shard, piece.end), piece.shard_offset);
  }
  return owned;
}

int64_t Fp32Sum::num_owned() const { return pieces_.back().shard_offset + pieces_.back().shard; }

// ---- one sum --------------------------------------------------------------------------------------------------------

void Fp32Sum::send() {
  for (Piece& piece : pieces_) {
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.first.expect(message(piece, is_one_shot() ? peer : world_size_ + peer), peer);
    }
  }
  for (Piece& piece : pieces_) {
    pack(piece);
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.first.send(message(piece, is_one_shot() ? rank_ : peer), peer);
    }
    if (is_one_shot()) {
      piece.first.start();
    }
  }
  if (device_.is_cpu() || is_one_shot()) {
    return;
  }
  beside_backward([this] {
    for (Piece& piece : pieces_) {
      piece.first.start();
    }
    drive();
  });
}

void Fp32Sum::pack(const Piece& piece) {
  RECORD_FUNCTION("fastsync::pack", {});
  const Turn turn{piece.begin == 0, piece.end == num_values_};
  BucketSum::pack(segments_of(piece, /*is_packing=*/true), bucket_.wire_dtype,
                  address(offset_of(piece, is_one_shot() ? rank_ : 0)), turn, static_cast<uint64_t>(piece.begin));
  if (turn.is_last) {
    add_extras(piece);
  }
}

void Fp32Sum::add_extras(const Piece& piece) {
  if (is_one_shot()) {
    put_extras(offset_of(piece, rank_) + piece.length, piece.stride, 1);
    return;
  }
  put_extras(offset_of(piece, 0) + piece.length, piece.stride, world_size_);  // to this rank's own slot for nothing
  put_extras(offset_of(piece, packing_slot(rank_)) + piece.length, piece.stride, 1);
}

void Fp32Sum::add_up_extras(const Piece& piece) {
  if (piece.end == num_values_) {
    sum_extras(offset_of(piece, is_one_shot() ? 0 : world_size_) + piece.length, piece.stride, world_size_);
  }
}

void Fp32Sum::drive_all() {
  if (is_one_shot()) {
    return;
  }
  for (Piece& piece : pieces_) {
    piece.first.wait();
    add_up_extras(piece);
    reduce(piece);
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.second.expect(sums_message(piece, peer), peer);
    }
    for (int64_t step = 1; step < world_size_; ++step) {
      piece.second.send(sums_message(piece, rank_), (rank_ + step) % world_size_);
    }
    piece.second.start();
  }
}

void Fp32Sum::reduce(const Piece& piece) {
  RECORD_FUNCTION("fastsync::reduce", {});
  ReduceArgs args = mean(address(offset_of(piece, world_size_)), bucket_.wire_dtype, world_size_, piece.stride,
                         piece.shard, address(offset_of(piece, rank_)), bucket_.wire_dtype,
                         static_cast<uint64_t>(piece.begin) + static_cast<uint64_t>(num_values_));
  if (residual_.defined()) {
    args.residual = residual_.narrow(0, piece.shard_offset, piece.shard).data_ptr();
  }
  run_reduce(args, device_);
}

void Fp32Sum::receive(Stopwatch& stopwatch) {
  for (Piece& piece : pieces_) {
    if (is_one_shot()) {
      piece.first.wait();
      add_up_extras(piece);
    } else {
      piece.second.wait();
    }
    if (piece.end == num_values_) {
      stopwatch.mark(Mark::kReduced);
    }
    unpack(segments_of(piece, /*is_packing=*/false), address(piece.offset), is_one_shot() ? world_size_ : 1,
           piece.stride, {piece.begin == 0, piece.end == num_values_});
  }
}

int64_t Fp32Sum::sent_bytes() const {
  int64_t sum = 0;
  for (const Piece& piece : pieces_) {
    sum += piece.first.sent_bytes() + piece.second.sent_bytes();
  }
  return sum;
}

}  // namespace fastsync
