// The sum of one bucket over the ranks, taken here and not by the process group: what all ways to take it share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backend.h"
#include "compression.h"
#include "sync_times.h"

namespace fastsync {

// A bucket as it is to be packed, and what its passes need.
struct PackedBucket {
  std::vector<Segment> segments;  // one after the other, each at a multiple of the alignment
  DType grad_dtype;
  DType wire_dtype;
  Algorithm algorithm;   // not kAllReduce
  at::Tensor scale;      // undefined where there is none
  at::Tensor stats;      // float64 [kNumStats]
  at::Tensor workspace;  // see new_workspace
  at::Tensor extras;     // float32, summed as they are beside the gradients; undefined where there are none
  Rounding rounding;
  at::Tensor step;  // int64 [1], what the rounding's points to; undefined where it has none
  int64_t alignment;
};

// What a bucket keeps from sum to sum.
struct Fp32Buffers {
  at::Tensor bytes;
  std::vector<int64_t> layout;  // what bytes were cleared for
};

constexpr int64_t kMessageAlignment = 64;

// What shards are multiples of, in values. On int8 so many blocks that messages begin at multiples of 16 bytes.
constexpr int64_t shard_multiple(DType wire) { return wire == DType::kInt8 ? 4 * kBlockValues : kBlockValues; }
static_assert(4 * sizeof(Int8Block) % 16 == 0);

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline std::byte* advance(void* data, int64_t bytes) { return static_cast<std::byte*>(data) + bytes; }
int64_t size_of(DType dtype);
// Of whole blocks where the dtype is int8.
int64_t bytes_of(int64_t values, DType dtype);
int64_t values_in(int64_t bytes, DType dtype);

class BucketSum {
 public:
  BucketSum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, PackedBucket bucket);
  virtual ~BucketSum() = default;
  BucketSum(const BucketSum&) = delete;
  BucketSum& operator=(const BucketSum&) = delete;

  // Which of its values this rank encodes the sums of, for error feedback: what that loses is kept in a vector of
  // num_owned values (Compute<G>), in which they have these places. Without it, it is lost.
  struct Owned {
    size_t segment;
    int64_t first;  // within the segment
    int64_t count;
    int64_t place;
    bool operator==(const Owned&) const = default;
  };
  virtual std::vector<Owned> owned() const = 0;
  virtual int64_t num_owned() const = 0;
  void keep_residual(at::Tensor residual) { residual_ = std::move(residual); }
  // The gradients' own residuals, for what is lost of sums that are not owned yet.
  void keep_own_residuals(std::vector<at::Tensor> residuals) { own_residuals_ = std::move(residuals); }

  // Packs piece after piece, each on its way before the next one is packed. Returns at once.
  virtual void send() = 0;

  // What comes between the first messages and the last ones: adds up what this rank adds up, and sends the sums. From
  // any thread; on CUDA send has done it. What goes wrong is thrown by finish.
  void drive();

  // Waits for the rest and unpacks. Marks the moment at which nothing is left to wait for.
  void finish(Stopwatch& stopwatch);

  // Gradients to be unpacked there instead: a vector of num_values of their dtype.
  void redirect(const at::Tensor& elsewhere);
  int64_t num_values() const { return num_values_; }

  // The sums of the extras, after finish. May lie in memory that the bucket's next sum writes to.
  const at::Tensor& extras() const { return bucket_.extras; }

  virtual int64_t sent_bytes() const = 0;

 protected:
  virtual void drive_all() = 0;
  virtual void receive(Stopwatch& stopwatch) = 0;

  // How many values are worth a message or, in shards, world_size of them: packing, travelling and unpacking of
  // neighbours overlap.
  int64_t values_per_piece(bool in_shards) const;
  // So many bytes, cleared where they were last used with another layout.
  void take(Fp32Buffers& buffers, int64_t num_bytes, std::vector<int64_t> layout);
  void* address(int64_t offset) const { return advance(bytes_.data_ptr(), offset); }

  // The segments' parts among the bucket's values [begin, end), of which begin shall lie at the offset.
  std::vector<Segment> cut(int64_t begin, int64_t end, int64_t offset) const;
  // Adds what lies there to owned, of which begin has this place.
  void own(std::vector<Owned>& owned, int64_t begin, int64_t end, int64_t place) const;

  void pack(const std::vector<Segment>& segments, DType dtype, void* wire, Turn turn, uint64_t seed);
  void unpack(const std::vector<Segment>& segments, const void* wire, int64_t num_wires, int64_t stride, Turn turn);
  Rounding rounding(uint64_t seed) const;
  // The mean of wires that have the bucket's scale.
  ReduceArgs mean(const void* wire, DType dtype, int64_t num_wires, int64_t stride, int64_t numel, void* out,
                  DType out_dtype, uint64_t seed) const;

  // Extras lie at the end of messages: of so many, the first of which ends there.
  int64_t extra_bytes() const { return bucket_.extras.defined() ? static_cast<int64_t>(bucket_.extras.nbytes()) : 0; }
  void put_extras(int64_t end, int64_t stride, int64_t count);
  void sum_extras(int64_t end, int64_t stride, int64_t count);

  // On CUDA: beside backward, whose stream must not wait for the network. finish comes after it.
  void beside_backward(const std::function<void()>& call);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  PackedBucket bucket_;
  int64_t world_size_;
  int64_t rank_;
  int64_t num_values_;
  double limit_;
  at::Tensor bytes_;
  at::Tensor residual_;
  std::vector<at::Tensor> own_residuals_;  // one for each segment

 private:
  // call(segment, how many of its values come before the part, and how many the part has).
  template <class Call>
  void for_each_part(int64_t begin, int64_t end, const Call& call) const;

  std::optional<c10::Event> done_beside_;
  std::mutex mutex_;  // held while driving
  bool is_driven_ = false;
  std::exception_ptr error_;
};

}  // namespace fastsync
