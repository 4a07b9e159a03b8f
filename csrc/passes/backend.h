// A backend is an implementation of the passes of pack_unpack.h. These functions call the passes on a device: they find
// its backend and its current stream.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync {

// Libraries of tests and benchmarks call these functions.
#define FASTSYNC_EXPORT __attribute__((visibility("default")))

class Workspace;

// Whether gradients may have the dtype: float32, float64, float16 or bfloat16.
bool is_supported(at::ScalarType dtype);
// Returns the type of a gradient or of a wire. For uint8, the bytes of blocks, it is kInt8.
FASTSYNC_EXPORT DType dtype_of(at::ScalarType dtype);
at::ScalarType scalar_type_of(DType dtype);
// Returns the dtype in which gradients are multiplied and added up.
at::ScalarType compute_dtype(at::ScalarType grad);

// Lays contiguous gradients out on a wire, in their order. Each begins at a multiple of the alignment and, on a wire of
// blocks, at the beginning of a block. residuals are contiguous too, one for each gradient, or none.
FASTSYNC_EXPORT std::vector<Segment> lay_out(at::TensorList grads, DType wire = DType::kFloat32,
                                             at::TensorList residuals = {}, int64_t alignment = 1);

// Returns the number of values that the segments take on the wire, rounded up to the alignment.
int64_t wire_length(const std::vector<Segment>& segments, int64_t alignment);

// Returns the alignment of a bucket's gradients on the wire, in values. It suits the widest vectors of a GPU, so that
// gradients behind one of odd size are read in vectors too. A single gradient needs no alignment.
int64_t alignment_of(DType wire, size_t num_gradients);

// Returns the memory of a bucket's scale; null if the scale is undefined.
float* data_or_null(const at::Tensor& scale);

// Copies the bytes of a few float32 values into a buffer of bytes, `count` times, at distances of `stride` bytes.
void put_values(const at::Tensor& values, const at::Tensor& buffer, int64_t offset, int64_t stride, int64_t count);

// Makes a tensor of the values on the device. The host does not wait for the copy.
at::Tensor to_device(const std::vector<float>& values, c10::Device device);
at::Tensor to_device(const std::vector<double>& values, c10::Device device);

// Whether unpacking takes an own_wire on the device.
bool takes_own_wire(c10::Device device);

// Returns the tensor's values if the host can read them without waiting, else null.
const double* readable(const at::Tensor& tensor);

// Sets the passes for a device that is neither a CPU nor CUDA.
FASTSYNC_EXPORT void register_passes(c10::DeviceType type, const Passes& passes);
// Returns the passes that were built or registered for the device, or null.
FASTSYNC_EXPORT const Passes* fused_passes(c10::DeviceType type);

// Returns "fused" if the device's own passes run. Returns "generic" if those of aten/passes.h run, because there are no
// others or because of FASTSYNC_KERNELS=aten. Throws c10::ValueError if that variable has another value than auto or
// aten.
std::string kernels_on(c10::DeviceType type);
// Overrides FASTSYNC_KERNELS from now on.
FASTSYNC_EXPORT void use_kernels(const std::string& name);

// These run the passes on the device's current stream.
FASTSYNC_EXPORT void run_pack(const PackArgs& args, c10::Device device, Workspace& workspace);
FASTSYNC_EXPORT void run_unpack(const UnpackArgs& args, c10::Device device, Workspace& workspace);
FASTSYNC_EXPORT void run_reduce(const ReduceArgs& args, c10::Device device);

}  // namespace fastsync
