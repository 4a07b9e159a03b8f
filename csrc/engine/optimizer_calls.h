// The calls of an optimizer's `step` that a thread is inside. Hooks of a step cannot tell one that calls another from
// two in a row, of which the first has failed: PyTorch calls no hook when a step throws.
#pragma once

#include <cstdint>
#include <vector>

namespace fastsync {

// Watches the scopes that torch's profiler knows: PyTorch opens one around each `step` and its hooks, and closes it
// when the step throws, too. Call it once, while the program begins.
void watch_optimizer_calls();

// Returns a number for each call that this thread is inside, from the outermost on. No two calls have the same one.
// Compiled code has no scopes, so there are none inside it.
const std::vector<int64_t>& optimizer_calls();

}  // namespace fastsync
