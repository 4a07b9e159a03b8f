// The fake device as PyTorch's PrivateUse1 backend: memory, streams and events. See order.h for what they are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <vector>

#include "order.h"

namespace fake_device {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Stream current_stream(c10::Device device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Device current_device();

// While the device is broken, each wait for an event throws what is no std::exception.
struct BrokenDevice {};
void set_broken(bool is_broken);

// From now on there is no memory for more bytes than these at once.
void set_most_bytes(size_t bytes);

c10::Allocator* allocator();
bool is_pinned(const void* data);

// A CPU tensor in the same memory.
at::Tensor on_host(const at::Tensor& tensor);
// The memory of a tensor's elements, as what an operation does with it.
void add_touches(std::vector<Touch>& touches, const at::Tensor& tensor, bool is_written);

}  // namespace fake_device
