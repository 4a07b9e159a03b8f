// The engine's passes for the fake device.
#pragma once

#include "passes/backend.h"

namespace fake_device {

// The CPU's passes on the current stream, which note what they touch.
const fastsync::Passes& passes_over(const fastsync::Passes& of_cpu);

// Returns how many tables of chunks were written to the device since the last call.
int64_t take_uploads();

}  // namespace fake_device
