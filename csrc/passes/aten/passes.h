// The passes on PyTorch's own operators alone, for every device that can copy and multiply: more launches and more
// memory than kernels of one's own take, and the same bits. See pack_unpack.h for what each does.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "passes/pack_unpack.h"

namespace fastsync::aten {

// The arguments' pointers are to memory of the device. On its current stream; the host waits for nothing.
void pack(const PackArgs& args, c10::Device device);
void unpack(const UnpackArgs& args, c10::Device device);
void reduce(const ReduceArgs& args, c10::Device device);

// The statistics of gradients of one dtype, as unpack takes them. Rare, so devices have no kernel of it.
void measure(at::TensorList grads, const at::Tensor& stats);

// As scale_exponent_for, of each element. Int32.
at::Tensor scale_exponent_for(const at::Tensor& largest);
// Float32 powers of two, of exponents of normal floats.
at::Tensor power_of_two(const at::Tensor& exponent);

}  // namespace fastsync::aten
