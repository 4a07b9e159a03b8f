// Errors of waits that fail: what was being done, why it failed, and who is missing.
#pragma once

#include <functional>
#include <string>

#include "transport/liveness.h"

namespace fastsync {

// Throws c10::Error with the beginning, why, where the ranks are, and what helps where some have no more batches.
[[noreturn]] void raise_failure(const std::string& beginning, const std::string& why, Liveness& liveness);

// Calls. What is thrown, but for a c10::ValueError, is the world's doing, and said so.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call);

}  // namespace fastsync
