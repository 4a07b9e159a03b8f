// The error of a wait for other ranks that has failed: what was done, why it failed, and which ranks are missing.
#pragma once

#include <functional>
#include <string>

#include "transport/liveness.h"

namespace fastsync {

// Calls. What it throws becomes a c10::Error, whose message is the beginning, why the call failed, where the ranks are
// and what may help. A c10::ValueError stays what it is, because it is the user's mistake and not a failed wait.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call);

}  // namespace fastsync
