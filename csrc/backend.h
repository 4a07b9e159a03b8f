// From tensors and devices to the raw-pointer passes of pack_unpack.h: types, the current stream, scratch memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <vector>

#include "pack_unpack.h"

namespace fastsync {

// True for the dtypes a gradient may have: float32, float64, float16, bfloat16.
bool is_supported(at::ScalarType dtype);
// Of a gradient, or of a wire, where uint8 stands for blocks of int8.
DType dtype_of(at::ScalarType dtype);

// Where contiguous gradients lie in a wire buffer: one after the other, on an int8 wire each from a new block on.
// residuals: as many, contiguous; or none.
std::vector<Segment> lay_out(at::TensorList grads, DType wire = DType::kFloat32, at::TensorList residuals = {});

// The element of a bucket's scale; null where there is none.
float* data_or_null(const at::Tensor& scale);

// Scratch memory for the passes over one bucket: zeros on CUDA, undefined on a CPU, which needs none.
at::Tensor new_workspace(c10::Device device);

// True while a CUDA graph is being captured on the current stream of the device.
bool is_capturing(c10::Device device);

// Makes the call on another stream than the current one, after what that has been given so far. On a CPU, at once.
void call_beside(c10::Device device, const std::function<void()>& call);

// Each runs on the current stream of the device.
void run_pack(const PackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_unpack(const UnpackArgs& args, c10::Device device, const at::Tensor& workspace);
void run_measure(const MeasureArgs& args, c10::Device device, const at::Tensor& workspace);
void run_reduce(const ReduceArgs& args, c10::Device device);

}  // namespace fastsync
