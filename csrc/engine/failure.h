// Errors of waits that fail: what was being done, why it failed, and who is missing.
#pragma once

#include <functional>
#include <string>

#include "transport/liveness.h"

namespace fastsync {

// Calls. What is thrown, but for a c10::ValueError, is the world's doing: it becomes a c10::Error with the beginning,
// why, where the ranks are, and what helps where some have no more batches.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call);

}  // namespace fastsync
