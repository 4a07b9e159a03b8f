// What small layers in single precision take longer for in a library: loops over their rows, on one thread, bitwise the
// same on every CPU.
#pragma once

#include <cstdint>

namespace fastsync {

// values → tanh(values), in place: within 2 units in the last place of the exact value (tests/ppo/test_ops.py).
void fast_tanh(float* values, int64_t numel);

// The gradient [rows, width] of activated = tanh(x) → that of x, in place, and into sums [width] its sum over rows.
void tanh_backward(float* grad, const float* activated, int64_t rows, int64_t width, float* sums);

}  // namespace fastsync
