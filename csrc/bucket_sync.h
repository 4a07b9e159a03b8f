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

class BucketSync {
 public:
  BucketSync(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device);

  // Averages the gradients over the group, in place. They are dense, contiguous, of one supported dtype and on the
  // bucket's device, the same on every rank. The future's value is the first gradient; it is complete when all are
  // averaged (on CUDA: when everything is enqueued, with the events to wait for). One sync at a time.
  // Marks every moment on the stopwatch.
  c10::intrusive_ptr<c10::ivalue::Future> sync(std::vector<at::Tensor> grads, Wire wire,
                                               std::shared_ptr<Stopwatch> stopwatch);

  // The power of two that fp16 values are multiplied with: one float32 element; undefined before the first fp16 sync.
  const at::Tensor& scale() const { return scale_; }
  void set_scale(at::Tensor scale) { scale_ = std::move(scale); }

  // float64 [kNumStats] on the device, of the newest sync.
  const at::Tensor& stats() const { return stats_; }

  // Where the times of the syncs and what they sent add up.
  const std::shared_ptr<BucketTotals>& totals() const { return totals_; }

 private:
  struct Flight;

  void agree_on_scale(const std::vector<Segment>& segments, DType dtype);
  at::Tensor wire_buffer(int64_t numel, at::ScalarType dtype);
  static void finish(const Flight& flight);

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
