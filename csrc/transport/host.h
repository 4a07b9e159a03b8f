// Which ranks of a group are processes of one host, agreed on by all.
//
// Note [Sharing memory with processes that nobody forked]
// The memory has no name in a file system, so nothing of it is left, however processes end. The first rank of a host
// makes it (memfd_create). The others open it as /proc/PID/fd/NUMBER, which the system allows to the same user alone,
// and the process group tells them this path. Ranks that name the same machine, namespaces and user are those of a
// host.
// Ranks vote three times: when they name their hosts, when memory was made, and when it was opened. A rank votes even
// if its part has failed, so no rank waits for one that cannot go on. A process keeps the memory's file open until all
// others have opened it.
// The first vote is once for a group, the others are for each bucket: memory is as large as a bucket needs.
// A rank that waits for another rank looks in /proc whether that one's process is still there.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory.h"

namespace fastsync {

// Thrown on all ranks of a group, with the same reason, if one of them cannot do its part.
struct CannotShare {
  std::string why;
};

// The host of this rank, and the hosts of the other ranks of a group.
class Host {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Ranks = std::vector<int64_t>;

  // What keeps this process from sharing memory with any other process, or empty.
  static std::string obstacle();
  // Throws c10::ValueError if FASTSYNC_SHARED_MEMORY is neither 0 nor 1.
  static void check_setting();

  // This and the next method are collectives, which all ranks call in the same order.

  // The group's. Ranks find it out once, and then keep it for as long as the group lives. It must not go with an engine
  // before: ranks let go of engines at different times, and one that had to find out again would wait in vain.
  static std::shared_ptr<const Host> of(const Group& group);
  // Memory of so many bytes for each host's ranks. The system takes each rank's part of it from near that rank's core.
  // Throws CannotShare.
  std::shared_ptr<SharedMemory> share(const Group& group, int64_t bytes) const;

  // The ranks of each host, ascending. Hosts are in the order of their first ranks, and the same on all ranks. Empty if
  // ranks cannot share memory.
  const std::vector<Ranks>& hosts() const { return hosts_; }
  const Ranks& ranks() const { return ranks_; }  // of this rank's host

  // Whether the process of the rank, of this host, has ended.
  bool has_ended(int64_t rank) const;

  explicit Host(const Group& group);

 private:
  std::string why_not_;  // ranks cannot share memory; empty if they can
  std::vector<Ranks> hosts_;
  Ranks ranks_;
  std::vector<std::string> processes_;  // of all ranks
};

// The group's CPU ranks by host, found out by all ranks together. Empty if they cannot share memory.
std::vector<Host::Ranks> hosts_of(const Host::Group& group);

}  // namespace fastsync
