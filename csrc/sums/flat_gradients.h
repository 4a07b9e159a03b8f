// FlatGradients makes one flat array of a bucket's gradients, and packs and unpacks it. Each sum reads and writes
// gradients through it alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "passes/backend.h"
#include "passes/workspace.h"

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
// The next two convert whole units of the wire, such as blocks.
int64_t bytes_of(int64_t values, DType dtype);
int64_t values_in(int64_t bytes, DType dtype);

// A range of the gradients' values that this rank has not packed, and its place among the wires.
struct OwnValues {
  Range range;
  int64_t wire;
};

struct FlatGradients {
  // The gradients must be dense, contiguous, of one supported dtype and on the device.
  // Each begins at a multiple of least_alignment on the wire, at least.
  FlatGradients(std::vector<at::Tensor> grads, DType wire_dtype, c10::Device device, int64_t least_alignment = 1);

  // Values of any dtype, as their bytes, which travel as they are.
  explicit FlatGradients(const at::Tensor& bytes);

  c10::Device device;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> nowhere;  // after unpack_to_nowhere, takes the results
  DType grad_dtype;
  DType wire_dtype;
  int64_t alignment;                     // each gradient begins at a multiple of it on the wire, in values
  std::vector<Segment> segments;         // the gradients, one after the other
  int64_t num_values;                    // how many values the gradients take on the wire, with the gaps between them
  at::Tensor scale;                      // the bucket's scale; undefined if there is none
  at::Tensor stats;                      // the bucket's statistics, float64 [kNumStats]
  bool needs_stats = true;               // whether somebody may ask for the statistics
  std::shared_ptr<Workspace> workspace;  // the bucket's
  at::Tensor side_values;    // float32, on the device, summed over the ranks as they are; undefined if there are none
  at::Tensor output;         // takes this rank's shard of the result in place of the gradients; else undefined
  double mean_factor = 1.0;  // the result is the mean times this
  at::Tensor weight;         // float64 [1], multiplies gradients before residuals are added; undefined if it is 1
  double multiplier = 1.0;   // multiplies what is packed
  double limit;              // bounds what is packed, see PackArgs
  // Above 0, the wires of the first so many ranks, or of all if there are fewer, are added up by
  // Note [Sums by a tree], and the others do not count.
  int64_t most_in_tree = 0;

  // The residuals: for each value, what the wire has not carried yet of it and of the sums that this rank has encoded.
  // They are Compute<G> [num_values], and the segments point to them. Undefined without error feedback.
  at::Tensor residual;
  int64_t residual_shift = 0;  // see PackArgs; the segments point to the residuals that are read

  std::vector<Range> all_values() const { return {{0, num_values, /*offset=*/0}}; }
  int64_t side_bytes() const { return side_values.defined() ? static_cast<int64_t>(side_values.nbytes()) : 0; }
  // Has unpack write to memory that nobody reads, so that the gradients stay what they are. Call it after the last
  // pack.
  void unpack_to_nowhere();

  // Packs these ranges of the gradients' values into the wire, with this dtype.
  void pack(const std::vector<Range>& ranges, DType dtype, void* wire, Position position) const;
  // Packs all values, and zeros between the gradients.
  void pack_all(void* wire) const;
  // Adds up the wires, each value times the factor, and unpacks the sums to these ranges of the gradients' values, or
  // of the output's.
  void unpack(const std::vector<Range>& ranges, const void* wire, int64_t num_wires, int64_t stride, double factor,
              Position position) const;
  // Whether the wire carries each value as it is, and unpacking can read this rank's own from the gradients.
  bool can_stay() const;
  // As unpack, to the output's range, where this rank's own values are in the gradients.
  void unpack_with_own(const Range& range, const OwnValues& own, const void* wire, int64_t num_wires, int64_t stride,
                       double factor, Position position) const;
  // Multiplies each gradient by its factor, in its own memory, and takes the statistics. The factors are float64, and
  // on the device. Undefined ones are 1.
  void multiply(const at::Tensor& factors) const;
  // Makes the arguments of run_reduce, which adds up the rows, each times the factor, and encodes the sum for the wire.
  ReduceArgs reduce_args(const void* rows, DType dtype, int64_t num_rows, int64_t stride, int64_t numel, void* out,
                         double factor) const;

 private:
  void unpack_to(const std::vector<Segment>& to, const void* wire, int64_t num_wires, int64_t stride, double factor,
                 Position position, int64_t own_wire) const;
  int64_t num_counted(int64_t num_wires) const {
    return most_in_tree > 0 ? std::min(num_wires, most_in_tree) : num_wires;
  }
  PackArgs pack_args(const std::vector<Segment>& from, DType dtype, void* wire, Position position,
                     int64_t gap_alignment) const;
  void copy_bytes(const std::vector<Segment>& segments, const void* wire, bool to_wire) const;
};

}  // namespace fastsync
