// Which backend of a process group serves a device.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

namespace fastsync {

inline std::string backend_name(c10d::ProcessGroup& group, c10::Device device) {
  return group.getBackend(device.type())->getBackendName();
}

// Whether messages are Gloo's: they are fast, and a work tells by itself that it has ended. The backend "fastsync"
// leaves messages to Gloo.
inline bool sends_by_gloo(c10d::ProcessGroup& group, c10::Device device) {
  const std::string name = backend_name(group, device);
  return name == "gloo" || name == "fastsync";
}

}  // namespace fastsync
