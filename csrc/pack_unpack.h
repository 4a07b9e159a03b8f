// The passes over memory, as raw-pointer signatures that the CPU and the CUDA backend both implement. No torch here.
#pragma once

#include <cstdint>

#include "wire_format.h"

namespace fastsync {

// One gradient, contiguous, and where its first element lies in the wire buffer, in elements.
struct Segment {
  void* data;
  int64_t numel;
  int64_t offset;
};

// What a bucket's passes found out, in one row of doubles so that one tensor holds it (counts are exact up to 2^53).
enum Stat : int { kSumOfSquares, kNumNonfinite, kNumSaturated, kMaxMagnitude, kNumStats };

// gradients → wire: wire[offset + i] = encode(gradient[i] * multiplier * bucket_scale), within ±limit if finite.
// Writes stats[kNumSaturated]. The wire may be the gradients' own memory where both have one type.
struct PackArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  DType wire_dtype;
  void* wire;
  double multiplier;
  double limit;
  const float* bucket_scale;  // on the gradients' device; null means 1
  double* stats;              // on the gradients' device
};

// wire → gradients: gradient[i] = encode(wire[offset + i] / bucket_scale), and the statistics of what was written:
// stats[kSumOfSquares], stats[kNumNonfinite] and stats[kMaxMagnitude] (over the finite ones). Then moves bucket_scale
// on for the next step.
struct UnpackArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  DType wire_dtype;
  const void* wire;
  float* bucket_scale;
  double* stats;
};

// The statistics of gradients alone, as unpack takes them; nothing but stats is written.
struct MeasureArgs {
  const Segment* segments;
  int64_t num_segments;
  DType grad_dtype;
  double* stats;
};

// Calls call(G{}) with the type of a gradient, or call(G{}, W{}) with the types of a gradient and of the wire, which is
// the gradient's own or a 16-bit one.
template <class Call>
void dispatch_grad(DType grad, const Call& call) {
  switch (grad) {
    case DType::kFloat32:
      return call(float{});
    case DType::kFloat64:
      return call(double{});
    case DType::kFloat16:
      return call(Float16{});
    case DType::kBFloat16:
      return call(BFloat16{});
  }
}

template <class Call>
void dispatch_wire(DType grad, DType wire, const Call& call) {
  dispatch_grad(grad, [&](auto g) {
    if (wire == DType::kFloat16) {
      call(g, Float16{});
    } else if (wire == DType::kBFloat16) {
      call(g, BFloat16{});
    } else {
      call(g, g);
    }
  });
}

namespace cpu {
void pack(const PackArgs& args);
void unpack(const UnpackArgs& args);
void measure(const MeasureArgs& args);
}  // namespace cpu

namespace cuda {

// Scratch memory of one bucket on the device, all zero before its first use; the kernels leave it ready for the next.
// Two launches that share it must not overlap.
constexpr int64_t kMaxBlocks = 512;
constexpr int64_t kWorkspaceBytes = (1 + 3 * kMaxBlocks) * 8;

// stream is a cudaStream_t. Throw std::runtime_error with CUDA's message when a launch fails.
void pack(const PackArgs& args, void* workspace, void* stream);
void unpack(const UnpackArgs& args, void* workspace, void* stream);
void measure(const MeasureArgs& args, void* workspace, void* stream);
}  // namespace cuda

}  // namespace fastsync
