// A workspace is the memory on a device that the passes over one bucket need beside gradients and wires.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "passes/backend.h"

namespace fastsync {

// The calls of a bucket follow one another in the order of their streams. A CPU needs no memory here.
class Workspace {
 public:
  FASTSYNC_EXPORT explicit Workspace(c10::Device device);

  // The memory that lasts from call to call, which a CUDA graph goes on using.
  const at::Tensor& totals() const { return totals_; }

  // Returns the memory for one call of the passes, on the current stream, which is `stream`. It holds until the next
  // call.
  Scratch prepare(const Passes& passes, c10::ArrayRef<Segment> segments, DType grad, DType wire, bool have_factors,
                  void* stream);

 private:
  // The tiles of a call's segments, on the device. Gradients mostly lie where they did in the step before. So a table
  // is written once and read in many steps. All of that happens on one stream.
  struct Table {
    std::vector<Segment> segments;  // none until the table is written
    int64_t tile_size = 0;
    DType grad = DType::kFloat32;
    bool have_factors = false;
    c10::StreamId stream = 0;
    int64_t num_tiles = 0;
    at::Tensor tiles = {};
  };

  Table* find(c10::ArrayRef<Segment> segments, int64_t tile_size, DType grad, bool have_factors);

  const c10::Device device_;
  at::Tensor totals_;          // undefined on a CPU
  std::vector<Table> tables_;  // the one that was used last comes last
  Table captured_;             // the one that a CUDA graph has written last
};

}  // namespace fastsync
