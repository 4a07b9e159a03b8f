// What the control groups (cgroups, of version 2) of this process still let it use.
#pragma once

#include <cstdint>

namespace fastsync {

// In bytes. Files that the system has read, and would drop for it, count as free. INT64_MAX where nothing limits it.
int64_t memory_left_in_cgroups();

// How many CPUs' time, rounded up. INT64_MAX where nothing limits it.
int64_t cpus_of_cgroups();

}  // namespace fastsync
