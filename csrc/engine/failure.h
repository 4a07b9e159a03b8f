// Explains why a wait for other ranks has failed: its error tells what was done, and which ranks are missing.
#pragma once

#include <functional>
#include <string>

#include "transport/liveness.h"

namespace fastsync {

// Makes the call. An error of the call becomes a c10::Error. Its message is the beginning, why the call failed, where
// the ranks are, and what may help. A c10::ValueError stays what it is, because it is the user's mistake and not a
// failed wait.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call);

}  // namespace fastsync
