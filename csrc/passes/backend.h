// Calls the passes of pack_unpack.h for a device: finds its backend, its current stream, and memory for it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync {

// True for the dtypes that a gradient may have: float32, float64, float16, bfloat16.
bool is_supported(at::ScalarType dtype);
// The type of a gradient or of a wire. For uint8, the bytes of blocks, it is kInt8.
DType dtype_of(at::ScalarType dtype);
at::ScalarType scalar_type_of(DType dtype);
// The dtype that products and sums of gradients are taken in.
at::ScalarType compute_dtype(at::ScalarType grad);

// Lays contiguous gradients out on a wire: in their order, each at a multiple of the alignment and, on a wire of
// blocks, at the beginning of a block. residuals are contiguous too, one for each gradient, or none.
std::vector<Segment> lay_out(at::TensorList grads, DType wire = DType::kFloat32, at::TensorList residuals = {},
                             int64_t alignment = 1);

// The number of elements that the segments take on the wire, rounded up to the alignment.
int64_t wire_length(const std::vector<Segment>& segments, int64_t alignment);

// The alignment of a bucket's gradients. It is that of the widest vectors that a GPU takes for any pair of types, so
// that the gradients behind an odd-sized one are read in vectors too. A single gradient needs none.
int64_t alignment_of(DType wire, size_t num_gradients);

// The element of a bucket's scale; null if the scale is undefined.
float* data_or_null(const at::Tensor& scale);

// Scratch memory for the passes over one bucket: zeros on CUDA, undefined on a CPU, which needs none.
at::Tensor new_workspace(c10::Device device);

// True while a CUDA graph is being captured on the current stream of the device.
bool is_capturing(c10::Device device);

// A buffer to send from, whose bytes are zeros or what was packed there before. On a CPU it is the kept one if that
// fits, because new memory costs page faults. On other devices it is always a new one, for which the allocator takes
// cached memory, so that idle buckets hold none.
at::Tensor send_buffer(at::Tensor& kept, int64_t numel, at::ScalarType dtype, c10::Device device);

// Copies the bytes of a few float32 values into a buffer of bytes, count times.
void put_values(const at::Tensor& values, const at::Tensor& buffer, int64_t offset, int64_t stride, int64_t count);

// A new tensor of the values on the device. The host does not wait for the copy.
at::Tensor to_device(const std::vector<float>& values, c10::Device device);

// The elements if the host can read them without waiting, else null.
const double* readable(const at::Tensor& tensor);

// The passes for one type of device, as pack_unpack.h declares them. They run on the stream with this native handle.
struct Passes {
  void (*pack)(const PackArgs&, void* workspace, void* stream);
  void (*unpack)(const UnpackArgs&, void* workspace, void* stream);
  void (*reduce)(const ReduceArgs&, void* workspace, void* stream);
};

// Sets the passes for a device that is neither a CPU nor CUDA.
void register_passes(c10::DeviceType type, const Passes& passes);
// The passes that were built or registered for the device, or null.
const Passes* fused_passes(c10::DeviceType type);

// "fused" if the device's own passes run. "generic" if those of aten/passes.h do, because there are no others or
// because FASTSYNC_KERNELS=aten says so. Throws c10::ValueError if that variable has a value it may not have.
std::string kernels_on(c10::DeviceType type);
// Takes the place of FASTSYNC_KERNELS from now on.
void use_kernels(const std::string& name);

// These run on the device's current stream.
void run_pack(const PackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_unpack(const UnpackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_reduce(const ReduceArgs& args, c10::Device device);

}  // namespace fastsync
