// Explains why a wait for other ranks has failed: its error tells what was done, and which ranks are missing.
#pragma once

#include <functional>
#include <string>

#include "transport/liveness.h"

namespace fastsync {

// Makes the call. Its errors tell what has failed, which `beginning` says, and why. They keep their types. Those of a
// wait for other ranks also tell where the ranks are and what may help, which takes seconds to find out. A
// c10::ValueError stays what it is, because it is the user's mistake.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call);

}  // namespace fastsync
