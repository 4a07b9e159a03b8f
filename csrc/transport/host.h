// Which ranks of a group are processes of one host, agreed on by all.
//
// Note [Sharing memory with processes that nobody forked]
// Memory has no name in a file system, so that nothing of it is left, however processes end. The first rank of a host
// makes it (memfd_create), and the others open it as /proc/PID/fd/NUMBER, which the system allows to the same user
// alone. Where that is they hear through the process group. Ranks that name the same machine, namespaces and user are
// those of a host, which may try.
// After each step all ranks vote, those too where something was thrown. So nobody waits for who cannot go on, and a
// process has the memory's file open until all others have opened it.
// Whoever waits for a rank looks in /proc whether its process is still there.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory.h"

namespace fastsync {

class Host {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Ranks = std::vector<int64_t>;

  // What keeps this process from sharing memory with any other; empty where nothing does.
  static std::string obstacle();
  // Throws c10::ValueError where FASTSYNC_SHARED_MEMORY is set to something else than 0 or 1.
  static void check_setting();

  // This and the next are for all ranks together, at the same place between their collectives.
  explicit Host(const Group& group);
  // Memory of so many bytes for each host's ranks, each rank's part of which lies near it. Null where not every rank
  // could get it: then why_not says why, on every rank.
  std::shared_ptr<SharedMemory> share(const Group& group, int64_t bytes);

  // Empty where memory can be shared so far; else which rank cannot, and why. The same on all ranks.
  const std::string& why_not() const { return why_not_; }

  // Ranks ascend. Hosts are in the order of their first ranks, and the same on all ranks. None where ranks cannot
  // share.
  const std::vector<Ranks>& hosts() const { return hosts_; }
  const Ranks& ranks() const { return hosts_[place_]; }  // of this one's host

  // Whether the process of the rank, of this host, has ended.
  bool has_ended(int64_t rank) const;

 private:
  std::string why_not_;
  std::vector<Ranks> hosts_;
  size_t place_ = 0;
  std::vector<std::string> processes_;  // of all ranks
};

// The group's CPU ranks by host, as above, found out by all ranks together; none where they cannot share memory.
std::vector<Host::Ranks> hosts_of(const Host::Group& group);

}  // namespace fastsync
