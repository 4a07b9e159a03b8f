// One bucket's way: pack → collective → unpack, with the buffers, the scale, the statistics and the timing it needs.
// The DDP hook and every other way in hand their buckets to this class, so numerics and errors are the same code.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"
#include "sync_times.h"

namespace fastsync {

// What travels: the gradients' own dtype, or 16 bits.
enum class Wire : int8_t { kNone, kFloat16, kBFloat16 };

// "none", "fp16", "bf16"; anything else throws c10::ValueError.
Wire wire_from_name(const std::string& name);
const char* name_of(Wire wire);

// Small float32 vectors on the bucket's device that travel beside its gradients and are summed over the ranks as they
// are. Undefined where there are none.
struct Extras {
  at::Tensor flags;   // zeros and ones, in the wire's dtype: a sum may be rounded, but is zero only where all are
  at::Tensor riders;  // in float32: in the bucket's collective where the wire is float32, or in one beside it
};

class BucketSync {
 public:
  BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device);

  // What is on its way between send and receive. No process group is among it: a Gloo thread may be the last to let go
  // of a flight, and a group that ended on its own thread would wait for itself.
  struct Flight;

  // Packs the gradients and hands them to the group. They are dense, contiguous, of one supported dtype and on the
  // bucket's device, the same on every rank. One flight at a time. Marks every moment on the stopwatch.
  std::shared_ptr<Flight> send(std::vector<at::Tensor> grads, Wire wire, std::shared_ptr<Stopwatch> stopwatch,
                               const Extras& extras = {});

  // Waits for the group (on CUDA: makes the current stream wait) and averages the gradients in place.
  static void receive(Flight& flight);

  // The extras' sums, after receive. They may lie in memory that the bucket's next send writes to.
  static at::Tensor flags(const Flight& flight);
  static at::Tensor riders(const Flight& flight);

  // As receive, except that the averages go nowhere. The scale moves on as it does on other ranks.
  static void discard(Flight& flight);

  // send, and receive when the group is done, on the thread that says so. A single gradient of the wire's dtype is its
  // own wire, so nothing else may use its memory meanwhile. The future's value is the first gradient.
  c10::intrusive_ptr<c10::ivalue::Future> sync(std::vector<at::Tensor> grads, Wire wire,
                                               std::shared_ptr<Stopwatch> stopwatch);

  c10::Device device() const { return device_; }

  // The power of two that fp16 values are multiplied with: one float32 element; undefined before the first fp16 sync.
  const at::Tensor& scale() const { return scale_; }
  void set_scale(at::Tensor scale) { scale_ = std::move(scale); }

  // float64 [kNumStats] on the device, of the newest sync.
  const at::Tensor& stats() const { return stats_; }

  // Where the times of the syncs and what they sent add up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  std::shared_ptr<Flight> prepare(std::vector<at::Tensor> grads, Wire wire, std::shared_ptr<Stopwatch> stopwatch,
                                  const Extras& extras, bool may_use_their_memory);
  void agree_on_scale(const std::vector<Segment>& segments, DType dtype);
  at::Tensor wire_buffer(int64_t numel, at::ScalarType dtype);
  void add_extras(Flight& flight, const Extras& extras);
  void all_reduce(Flight& flight);
  static void wait(Flight& flight);
  static void unpack(const Flight& flight);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const std::string> failure_;  // how an error begins: "fastsync: all_reduce of bucket 0 failed on ..."
  c10::Device device_;
  at::Tensor wire_;  // kept between syncs on a CPU only, where a fresh buffer would cost page faults
  at::Tensor scale_;
  at::Tensor stats_;
  at::Tensor workspace_;
  std::shared_ptr<BucketTotals> totals_ = std::make_shared<BucketTotals>();
};

}  // namespace fastsync
