// Ranks agree before their first sync on what they synchronise, because ranks that differ would hang or add up garbage.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fastsync {

// A hash of the text that is the same on every machine.
uint64_t fingerprint(const std::string& text);

// Returns every rank's text, in rank order. Texts have less than `size` bytes, and travel as tensors on the device.
std::vector<std::string> gather_texts(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& text,
                                      int64_t size, c10::Device device);

// Closes all connections of this rank in a group of Gloo: its own waits fail, and so do those of ranks that wait for
// it. To that end it waits for a message that never comes, on whose time-out Gloo closes them. The group is of no use
// afterwards. Other backends take no notice.
void close_connections(c10d::ProcessGroup& group);
void close_connections(c10d::Backend& backend);

// What check_agreement finds out.
struct Agreed {
  int64_t number;       // it is the same on all ranks of the group, and no earlier call has returned it
  bool has_one_failed;  // whether a rank has said so
};

// Compares lines of text, and the version of fastsync's protocol, over all ranks of the group. If they differ, every
// rank throws c10::ValueError with the first line that differs, and which ranks have which version of it. `what` names
// in the error what they do not agree on. While ranks agree, only a hash travels, as a tensor on the device. Each
// rank also says whether it has failed.
// With Gloo it calls `look` while it waits. If `look` throws, the wait ends, and this rank's connections of the group
// are closed.
Agreed check_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& lines,
                       c10::Device device, const std::string& what = "what to synchronise",
                       const std::function<void()>& look = nullptr, bool has_failed = false);

}  // namespace fastsync
