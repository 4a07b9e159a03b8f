// From tensors and devices to the raw-pointer passes of pack_unpack.h: types, the current stream, scratch memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync {

// True for the dtypes a gradient may have: float32, float64, float16, bfloat16.
bool is_supported(at::ScalarType dtype);
// Of a gradient, or of a wire, where uint8 stands for blocks.
DType dtype_of(at::ScalarType dtype);
at::ScalarType scalar_type_of(DType dtype);
// What a gradient's products and sums are taken in.
at::ScalarType compute_dtype(at::ScalarType grad);

// Where contiguous gradients lie in a wire buffer: one after the other, each at a multiple of the alignment, on a
// wire of blocks at the beginning of one. residuals: as many, contiguous; or none.
std::vector<Segment> lay_out(at::TensorList grads, DType wire = DType::kFloat32, at::TensorList residuals = {},
                             int64_t alignment = 1);

// How many elements those take on the wire, with what lies between and behind them up to the next multiple.
int64_t wire_length(const std::vector<Segment>& segments, int64_t alignment);

// The alignment of a bucket's gradients: that of the widest vectors in which a GPU goes over any pair of types, so that
// one odd-sized gradient does not leave those behind it without vectors. A single gradient needs none.
int64_t alignment_of(DType wire, size_t num_gradients);

// The element of a bucket's scale; null where there is none.
float* data_or_null(const at::Tensor& scale);

// Scratch memory for the passes over one bucket: zeros on CUDA, undefined on a CPU, which needs none.
at::Tensor new_workspace(c10::Device device);

// True while a CUDA graph is being captured on the current stream of the device.
bool is_capturing(c10::Device device);

// A buffer for what is sent, whose bytes are zeros or what was packed there before. On a CPU the one that was kept, if
// it fits, for a fresh one would cost page faults; elsewhere the caching allocator's, so that idle buckets hold no
// memory.
at::Tensor send_buffer(at::Tensor& kept, int64_t numel, at::ScalarType dtype, c10::Device device);

// The bytes of a few float32 values into a buffer of bytes, count times.
void put_values(const at::Tensor& values, const at::Tensor& buffer, int64_t offset, int64_t stride, int64_t count);

// A new tensor of them, for which the host does not wait.
at::Tensor to_device(const std::vector<float>& values, c10::Device device);

// The elements, where the host can read them without waiting; else null.
const double* readable(const at::Tensor& tensor);

// The passes of one type of device, as pack_unpack.h declares them; on the stream with this native handle.
struct Passes {
  void (*pack)(const PackArgs&, void* workspace, void* stream);
  void (*unpack)(const UnpackArgs&, void* workspace, void* stream);
  void (*reduce)(const ReduceArgs&, void* workspace, void* stream);
};

// For a device that is neither a CPU nor CUDA.
void register_passes(c10::DeviceType type, const Passes& passes);
// What was built or registered for the device; null where nothing was.
const Passes* fused_passes(c10::DeviceType type);

// "fused" where the device's own passes run, "generic" where those on PyTorch's operators do, see aten/passes.h: where
// there are no others, and everywhere with FASTSYNC_KERNELS=aten. Throws c10::ValueError for another value of that.
std::string kernels_on(c10::DeviceType type);
// As FASTSYNC_KERNELS, from now on.
void use_kernels(const std::string& name);

// Each runs on the current stream of the device.
void run_pack(const PackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_unpack(const UnpackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_reduce(const ReduceArgs& args, c10::Device device);

}  // namespace fastsync
