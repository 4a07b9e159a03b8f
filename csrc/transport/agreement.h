// Do all ranks mean the same? Asked once, before the first sync, because ranks that differ would hang or add up
// garbage.
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

// Every rank's text, in rank order: less than `size` bytes each, through tensors on the device.
std::vector<std::string> gather_texts(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& text,
                                      int64_t size, c10::Device device);

// Lets all fail that wait in the group for this rank, or on it: Gloo closes all connections of a rank whose message
// does not come in time. The group is of no use afterwards. Other backends take no notice.
void close_connections(c10d::ProcessGroup& group);

// Compares lines of text, and the version of what ranks send each other, over all ranks of the group, through tensors
// on the device. Where they differ, every rank throws c10::ValueError with the first line that differs and which ranks
// have which version of it. `what` is what they then do not agree on. Only a hash travels while they agree. Returns a
// number that the group's ranks have agreed on and got from no earlier call.
// With Gloo it calls `look` while it waits. What that throws ends the wait, and with it all connections of the group.
int64_t check_agreement(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& lines,
                        c10::Device device, const std::string& what = "what to synchronise",
                        const std::function<void()>& look = nullptr);

}  // namespace fastsync
