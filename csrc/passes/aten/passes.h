// The passes of pack_unpack.h by PyTorch's own operators, for devices without kernels of ours. They take more launches
// and more memory than kernels do, and give the same bits. They do to whole tensors what wire_format.h does to one
// value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "passes/pack_unpack.h"

namespace fastsync::aten {

// The pointers are to memory of the device. The passes run on its current stream, and the host does not wait for them.
void pack(const PackArgs& args, c10::Device device);
void unpack(const UnpackArgs& args, c10::Device device);
void reduce(const ReduceArgs& args, c10::Device device);

// Writes the statistics of gradients of one dtype, as unpack does. It runs on every device, for it is rare.
void measure(at::TensorList grads, const at::Tensor& stats);

// Returns what next_bucket_scale of wire_format.h returns, as float32 [1].
at::Tensor next_scale(const at::Tensor& scale, const at::Tensor& largest);
// Returns scale_exponent_for of wire_format.h for each element, as int32.
at::Tensor scale_exponent_for(const at::Tensor& largest);
// Returns two to the power of each exponent, as normal float32 values.
at::Tensor power_of_two(const at::Tensor& exponent);

}  // namespace fastsync::aten
