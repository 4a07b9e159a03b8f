// One bucket's way: pack → collective → unpack, with the buffers, the scale, the residuals, the statistics and the
// timing it needs.
// The DDP hook and every other way in hand their buckets to this class, so numerics and errors are the same code.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend.h"
#include "bucket_sum.h"
#include "compression.h"
#include "progress_thread.h"
#include "roll_call.h"
#include "sync_times.h"

namespace fastsync {

// Small float32 vectors on the bucket's device that travel beside its gradients and are summed over the ranks as they
// are. Undefined where there are none.
struct Extras {
  at::Tensor flags;   // zeros and ones: a sum may be rounded, but is zero only where all are
  at::Tensor riders;  // summed in float32, whatever the wire
};

// One sync of a bucket: how, and what it has in common with its counterparts on other ranks.
struct Sync {
  Compression compression;
  int64_t step = 0;        // this and the next are what the rounding follows
  int64_t index = 0;       // of the bucket
  int tag = 0;             // of its messages; the next kTagsPerBucket - 1 are its as well
  bool ends_step = false;  // once it has been received
};
constexpr int kTagsPerBucket = 4;

// What a bucket of so many values travels with. Throws c10::ValueError where that changes from step to step and a CUDA
// graph is being captured on the device.
const Compression& compression_for(const Schedule& schedule, int64_t step, int64_t numel, c10::Device device);

// The first tag of an engine's buckets, from a number that its ranks have agreed on. Far from those that people choose,
// and with room for kMaxBuckets of them before another engine's begin.
constexpr int64_t kMaxBuckets = (1 << 14) / kTagsPerBucket;
inline int first_tag(int64_t number) {
  return static_cast<int>(1 << 30 | (number % (1 << 16)) * kMaxBuckets * kTagsPerBucket);
}

// What a wire has not carried yet of one gradient, in its own units: what this rank's packing lost, and what this rank
// lost of the sums it re-encoded (zeros where others did). Flat, in the order of the gradient's memory; undefined where
// there is nothing.
struct Residual {
  at::Tensor own;
  at::Tensor of_sums;
};

class BucketSync {
 public:
  // It notes where the engine stands.
  BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
             std::shared_ptr<Whereabouts> whereabouts);

  // What is on its way between send and receive. No process group is among it where the group adds up: one of its
  // threads may then be the last to let go of a flight, and a group that ended on its own thread would wait for itself.
  struct Flight;

  // Packs the gradients and sends them. They are dense, contiguous, of one supported dtype and on the bucket's device,
  // the same on every rank. Those that stand in for none take no part in error feedback. One flight at a time. Marks
  // every moment on the stopwatch.
  std::shared_ptr<Flight> send(std::vector<at::Tensor> grads, const Sync& sync, std::shared_ptr<Stopwatch> stopwatch,
                               const Extras& extras = {}, const std::vector<bool>& stand_in = {});

  // Does what can be done before receive, if there is anything, on whatever thread comes first.
  static void drive(Flight& flight);
  static bool needs_driving(const Flight& flight);

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  static void receive(Flight& flight);

  // The extras' sums, after receive. They may lie in memory that the bucket's next send writes to.
  static at::Tensor flags(const Flight& flight);
  static at::Tensor riders(const Flight& flight);

  // As receive, except that the averages go nowhere. The scale moves on as it does on other ranks.
  static void discard(Flight& flight);

  // send, and receive when the group is done, on the thread that says so or on the progress thread. A single gradient
  // of the wire's dtype may be its own wire, so nothing else may use its memory meanwhile; extras then take a
  // collective of their own, elsewhere there is room beside the gradients. What is called with the sums of the flags
  // may throw. The future's value is the buffer.
  using OnFlags = std::function<void(const at::Tensor& flags)>;
  c10::intrusive_ptr<c10::ivalue::Future> sync(const at::Tensor& buffer, std::vector<at::Tensor> grads,
                                               const Sync& sync, std::shared_ptr<Stopwatch> stopwatch,
                                               ProgressThread& progress, const Extras& extras = {},
                                               OnFlags on_flags = nullptr);
  bool has_room(const std::vector<at::Tensor>& grads, const Compression& compression) const;

  // Whether send waits for the other ranks, to agree on the first fp16 scale, or on one after a step that says nothing
  // of how large gradients are.
  bool waits_to_send(const Compression& compression) const {
    return compression.wire == Wire::kFloat16 && (!scale_.defined() || has_lost_scale());
  }

  c10::Device device() const { return device_; }

  // The power of two that fp16 values are multiplied with: one float32 element; undefined where the next fp16 sync
  // finds it out.
  at::Tensor scale() const { return has_lost_scale() ? at::Tensor() : scale_; }
  void set_scale(at::Tensor scale) { scale_ = std::move(scale); }

  // One for each gradient; empty where error feedback was never on. Setting them keeps what others held in of_sums.
  bool has_residuals() const { return !residuals_.empty(); }
  std::vector<Residual> residuals() const;
  void set_residuals(const std::vector<Residual>& residuals);
  // The mean of a gradient that no rank has is what error feedback had kept of the sums: to be sent again. On all
  // ranks. False where nothing is ever kept.
  bool take_back(size_t index, const at::Tensor& mean);

  // The statistics are of these gradients alone.
  void measure(const std::vector<at::Tensor>& grads);

  // float64 [kNumStats] on the device, of the newest sync.
  const at::Tensor& stats() const { return stats_; }

  // Where the times of the syncs and what they sent add up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel) const;
  std::shared_ptr<Flight> prepare(std::vector<at::Tensor> grads, const Sync& sync, std::shared_ptr<Stopwatch> stopwatch,
                                  const Extras& extras);
  void pack_for_all_reduce(Flight& flight, const Extras& extras, bool may_use_their_memory);
  void send_to_ranks(Flight& flight, const Sync& sync, const Extras& extras);
  Rounding rounding_of(const Sync& sync);
  void add_residuals(Flight& flight, const Sync& sync, const std::vector<bool>& stand_in);
  void own_residuals(BucketSum& sum);
  void disown(const std::vector<BucketSum::Owned>& now_owned, int64_t num_owned);
  std::vector<at::Tensor> residuals_of_sums() const;
  c10::intrusive_ptr<c10::ivalue::Future> receive_later(std::shared_ptr<Flight> flight, const at::Tensor& buffer,
                                                        ProgressThread& progress) const;
  bool has_lost_scale() const;
  void measure(const std::vector<Segment>& segments, DType dtype);
  void agree_on_scale(const std::vector<Segment>& segments, DType dtype);
  at::Tensor wire_buffer(int64_t numel, at::ScalarType dtype);
  void add_extras(Flight& flight, const Extras& extras);
  void all_reduce(Flight& flight);
  static void wait(Flight& flight);
  static void unpack(const Flight& flight);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  struct Failure;
  std::shared_ptr<const Failure> failure_;
  c10::Device device_;
  bool can_exchange_;  // whether ranks may send each other messages at any time: on a CPU, with Gloo
  at::Tensor wire_;    // kept between syncs on a CPU only, where a fresh buffer would cost page faults
  Fp32Buffers fp32_buffers_;
  std::vector<at::Tensor> residuals_;  // what packing lost, one for each gradient
  at::Tensor owned_residual_;          // what encoding the sums lost, and of which values of the gradients
  std::vector<BucketSum::Owned> owned_;
  std::vector<at::Tensor> loaded_residuals_of_sums_;  // until it is known which values are owned
  at::Tensor scale_;
  // int64 [1], the step that stochastic rounding follows. Unpacking adds one, so that after the newest sync it is the
  // other.
  at::Tensor counter_;
  std::optional<int64_t> next_counted_;
  at::Tensor stats_;
  at::Tensor workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
};

}  // namespace fastsync
