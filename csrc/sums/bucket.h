// A bucket as it is to be summed: whose values they are, where they go, and the passes that bring them there. Each sum
// reads and writes gradients through here alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "passes/backend.h"

namespace fastsync {

// The bucket's values [begin, end), of which begin has this place on a wire.
struct Span {
  int64_t begin;
  int64_t end;
  int64_t place;
};

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline std::byte* advance(void* data, int64_t bytes) { return static_cast<std::byte*>(data) + bytes; }
inline const std::byte* advance(const void* data, int64_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
// Of whole units of the wire, such as blocks.
int64_t bytes_of(int64_t values, DType dtype);
int64_t values_in(int64_t bytes, DType dtype);

struct Bucket {
  // The gradients are dense, contiguous, of one supported dtype and on the device.
  Bucket(std::vector<at::Tensor> grads, DType wire_dtype, c10::Device device);

  c10::Device device;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> nowhere;  // see redirect
  DType grad_dtype;
  DType wire_dtype;
  int64_t alignment;              // of the gradients on the wire
  std::vector<Segment> segments;  // of the gradients, one after the other
  int64_t num_values;             // that they take on the wire
  at::Tensor scale;               // undefined where there is none
  at::Tensor stats;               // float64 [kNumStats]
  at::Tensor workspace;           // see new_workspace
  at::Tensor side_values;  // float32, on the device, summed over the ranks as they are; undefined where there are none
  at::Tensor output;       // of a reduce-scatter: takes the mean in place of the gradients
  double mean_factor = 1.0;  // of what is unpacked
  at::Tensor weight;         // float64 [1], of the gradients before residuals are added; undefined where it is 1
  bool rows_add_up = false;  // what ranks pack is parts of the mean, and not what it is the mean of
  double multiplier = 1.0;   // this and the next: of what is packed
  double limit;

  // Error feedback: what this rank has lost of each value, also in encoding sums, Compute<G> [num_values], to which the
  // segments point. Undefined without error feedback.
  at::Tensor residual;

  int64_t side_bytes() const { return side_values.defined() ? static_cast<int64_t>(side_values.nbytes()) : 0; }
  // The segments' parts among the values of the spans, at the places of those.
  std::vector<Segment> cut(const std::vector<Span>& spans) const;
  // Once all is packed: averages go to memory that nobody reads, and the gradients stay what they are.
  void redirect();

  void pack(const std::vector<Segment>& from, DType dtype, void* wire, Position position) const;
  // What each of so many rows counts in their sum.
  double share_of_row(int64_t num_rows) const { return rows_add_up ? 1.0 : 1.0 / static_cast<double>(num_rows); }
  // The sum of the wires' values times the factor, which makes it the mean, times mean_factor, where none is given.
  void unpack(const std::vector<Segment>& to, const void* wire, int64_t num_wires, int64_t stride, Position position,
              std::optional<double> factor = {}) const;
  // The sum of rows that have the bucket's scale, each times the share, encoded for the wire.
  ReduceArgs sum(const void* rows, DType dtype, int64_t num_rows, int64_t stride, int64_t numel, void* out,
                 double share) const;
};

}  // namespace fastsync
