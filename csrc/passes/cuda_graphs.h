// A CUDA graph that was captured goes on reading and writing the memory of its capture, whatever the engine does since.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace fastsync {

// Whether a CUDA graph is being captured on the current stream of the device.
bool is_capturing(c10::Device device);

// Keeps tensors for as long as the graph may replay that is being captured on the current stream. Call it with memory
// from before the capture; the graph itself keeps what is allocated meanwhile. Does nothing if no graph is captured.
void hold_for_graph(c10::Device device, std::vector<at::Tensor> tensors);

// Destroys what was held for graphs that are gone by now. Each step calls it, so it costs nothing if there is none.
void let_go_of_ended_graphs();

}  // namespace fastsync
