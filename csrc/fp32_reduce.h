// The sum of one bucket over the ranks, taken here and not by the process group, so that it is in float32 whatever
// travels: one rounding on the way in and at most one on the way out, however many ranks there are.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "backend.h"
#include "compression.h"
#include "exchange.h"
#include "sync_times.h"

namespace fastsync {

// A bucket as it is to be packed, and what its passes need.
struct PackedBucket {
  std::vector<Segment> segments;  // one after the other; on an int8 wire each at the beginning of a block
  DType grad_dtype;
  DType wire_dtype;
  Algorithm algorithm;   // kOneShot or kTwoShot
  at::Tensor scale;      // undefined where there is none
  at::Tensor stats;      // float64 [kNumStats]
  at::Tensor workspace;  // see new_workspace
  at::Tensor extras;     // float32, summed as they are beside the gradients; undefined where there are none
  Rounding rounding;
};

// What a bucket keeps from sum to sum.
struct Fp32Buffers {
  at::Tensor bytes;
  std::vector<int64_t> layout;  // what bytes were cleared for
};

class Fp32Sum {
 public:
  Fp32Sum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
          Fp32Buffers& buffers);

  // Which of its values this rank adds up in two_shot, for error feedback: what encoding the sums loses is kept in a
  // vector of num_owned values (Compute<G>), in which they have these places. Without it, it is lost.
  struct Owned {
    size_t segment;
    int64_t first;  // within the segment
    int64_t count;
    int64_t place;
    bool operator==(const Owned&) const = default;
  };
  std::vector<Owned> owned() const;
  int64_t num_owned() const;
  void keep_residual(at::Tensor residual) { residual_ = std::move(residual); }

  // Packs piece after piece, each on its way before the next one is packed. Returns at once.
  void send();

  // two_shot's second half, as far as it can be done before everything is there: adds this rank's shards up and sends
  // the sums. From any thread; on CUDA send has done it. What goes wrong is thrown by finish.
  void drive();

  // Waits for the rest and unpacks. Marks the moment at which nothing is left to wait for.
  void finish(Stopwatch& stopwatch);

  // Gradients to be unpacked there instead: a vector of num_values of their dtype.
  void redirect(const at::Tensor& elsewhere);
  int64_t num_values() const { return num_values_; }

  // The sums of the extras, after finish. May lie in memory that the bucket's next sum writes to.
  const at::Tensor& extras() const { return bucket_.extras; }

  int64_t sent_bytes() const;

 private:
  // As many values as are worth a message: packing, travelling and unpacking of neighbours overlap.
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

  int64_t bytes_of(int64_t values) const;
  int64_t values_in(int64_t bytes) const;
  std::vector<Segment> cut(int64_t begin, int64_t end, int64_t offset) const;
  std::vector<Segment> segments_of(const Piece& piece, bool is_packing) const;
  at::Tensor message(const Piece& piece, int64_t slot) const;
  at::Tensor sums_message(const Piece& piece, int64_t slot) const;
  at::Tensor extras_in(const Piece& piece, int64_t slot) const;
  void* address(const Piece& piece, int64_t slot) const;
  int64_t packing_slot(int64_t rank) const;
  void lay_out(int tag, Fp32Buffers& buffers);
  void pack(const Piece& piece);
  void add_extras(const Piece& piece);
  void sum_extras(const Piece& piece);
  void reduce(const Piece& piece);
  void unpack(const Piece& piece);
  void drive_all();

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  PackedBucket bucket_;
  int64_t world_size_;
  int64_t rank_;
  int64_t num_values_;
  double limit_;
  at::Tensor bytes_;
  at::Tensor residual_;
  std::vector<Piece> pieces_;

  std::mutex mutex_;  // held while driving
  bool is_driven_ = false;
  std::exception_ptr error_;
};

}  // namespace fastsync
