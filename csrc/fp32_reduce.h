// The sum of one bucket over ranks whose links are alike, so that it is in float32 whatever travels: one rounding on
// the way in and at most one on the way out, however many ranks there are.
#pragma once

#include <cstdint>
#include <vector>

#include "bucket_sum.h"
#include "exchange.h"

namespace fastsync {

// kOneShot or kTwoShot.
class Fp32Sum final : public BucketSum {
 public:
  Fp32Sum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
          Fp32Buffers& buffers);

  std::vector<Owned> owned() const override;
  int64_t num_owned() const override;
  void send() override;
  int64_t sent_bytes() const override;

 private:
  struct Piece {
    int64_t begin;  // in values
    int64_t end;
    int64_t shard;         // values that each rank adds up, or gets from each: a multiple of kBlockValues
    int64_t offset;        // in bytes, of its messages
    int64_t length;        // in bytes, of one
    int64_t stride;        // in bytes, from one to the next
    int64_t shard_offset;  // in values, in the residual
    Exchange first;
    Exchange second;
  };

  bool is_one_shot() const { return bucket_.algorithm == Algorithm::kOneShot; }
  std::vector<Segment> segments_of(const Piece& piece, bool is_packing) const;
  int64_t offset_of(const Piece& piece, int64_t slot) const { return piece.offset + slot * piece.stride; }
  at::Tensor message(const Piece& piece, int64_t slot) const;
  at::Tensor sums_message(const Piece& piece, int64_t slot) const;
  int64_t packing_slot(int64_t rank) const;
  void lay_out(int tag, Fp32Buffers& buffers);
  void pack(const Piece& piece);
  void add_extras(const Piece& piece);
  void add_up_extras(const Piece& piece);
  void reduce(const Piece& piece);
  void drive_all() override;
  void receive(Stopwatch& stopwatch) override;

  std::vector<Piece> pieces_;
};

}  // namespace fastsync
