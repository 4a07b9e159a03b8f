// The engine's passes for the fake device.
#pragma once

#include "passes/backend.h"

namespace fake_device {

// The CPU's passes on the current stream, which note what they touch.
const fastsync::Passes& passes_over(const fastsync::Passes& of_cpu);

}  // namespace fake_device
