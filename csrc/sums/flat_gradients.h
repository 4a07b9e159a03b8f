// The gradients of one bucket as one flat array, and the passes that pack and unpack it. Each sum reads and writes
// gradients through here alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "passes/backend.h"

namespace fastsync {

// The bucket's values [begin, end), and where they begin on a wire.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t offset;  // in values
};

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline std::byte* advance(void* data, int64_t bytes) { return static_cast<std::byte*>(data) + bytes; }
inline const std::byte* advance(const void* data, int64_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
// Both convert whole units of the wire, such as blocks.
int64_t bytes_of(int64_t values, DType dtype);
int64_t values_in(int64_t bytes, DType dtype);

struct FlatGradients {
  // The gradients are dense, contiguous, of one supported dtype and on the device.
  FlatGradients(std::vector<at::Tensor> grads, DType wire_dtype, c10::Device device);

  c10::Device device;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> nowhere;  // memory in place of the gradients', after redirect
  DType grad_dtype;
  DType wire_dtype;
  int64_t alignment;              // of each gradient on the wire, in values
  std::vector<Segment> segments;  // the gradients, one after the other
  int64_t num_values;             // on the wire
  at::Tensor scale;               // undefined if there is none
  at::Tensor stats;               // float64 [kNumStats]
  at::Tensor workspace;           // see new_workspace
  at::Tensor side_values;    // float32, on the device, summed over the ranks as they are; undefined if there are none
  at::Tensor output;         // takes a reduce-scatter's result in place of the gradients; else undefined
  double mean_factor = 1.0;  // the result is the mean times this
  at::Tensor weight;         // float64 [1], multiplies gradients before residuals are added; undefined if it is 1
  double multiplier = 1.0;   // multiplies what is packed
  double limit;              // bounds what is packed, see PackArgs

  // What the wire has not carried yet of each value, also of sums that this rank has encoded: Compute<G> [num_values],
  // to which the segments point. Undefined without error feedback.
  at::Tensor residual;

  int64_t side_bytes() const { return side_values.defined() ? static_cast<int64_t>(side_values.nbytes()) : 0; }
  // Has unpack write to memory that nobody reads, so that the gradients stay what they are. To be called after the last
  // pack.
  void redirect();

  // Packs these ranges of the gradients' values.
  void pack(const std::vector<Range>& ranges, DType dtype, void* wire, Position position) const;
  // Adds up the wires, each value times the factor, and unpacks the sums to these ranges of the gradients' values, or
  // of the output's.
  void unpack(const std::vector<Range>& ranges, const void* wire, int64_t num_wires, int64_t stride, double factor,
              Position position) const;
  // The arguments of run_reduce for rows that have the bucket's scale, each times the factor, encoded for the wire.
  ReduceArgs reduce_args(const void* rows, DType dtype, int64_t num_rows, int64_t stride, int64_t numel, void* out,
                         double factor) const;
};

}  // namespace fastsync
