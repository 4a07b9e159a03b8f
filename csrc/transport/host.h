// Which ranks of a group are processes of one host, agreed on by all.
//
// Note [Sharing memory with processes that nobody forked]
// Memory has no name in a file system, so that nothing of it is left, however processes end. One process makes it
// (memfd_create), and others open it as /proc/PID/fd/NUMBER, which the system allows to the same user alone. Where that
// is they hear through the process group, together with the memory's name, which is random: so nobody takes other
// memory for it. Ranks that name the same machine, namespaces and user are those of a host, which may try.
// After each step all ranks vote, those too where something was thrown. So nobody waits for who cannot go on, and a
// process has its memory open until all others have opened it.
// Each rank keeps a file of its own open like that. Whoever waits for it looks whether it is still there: the system
// closes it when the process ends, and in a child it would be at another address.
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

  // What keeps this process from sharing memory with any other; empty where nothing does.
  static std::string obstacle();
  // Throws c10::ValueError where FASTSYNC_SHARED_MEMORY is set to something else than 0 or 1.
  static void check_setting();

  // This and the next are for all ranks together, at the same place between their collectives.
  explicit Host(const Group& group);
  // Memory of so many bytes for each host's ranks, each rank's part of which lies near it. Null where not every rank
  // could get it; `why_not` says why, on every rank.
  std::shared_ptr<SharedMemory> share(const Group& group, int64_t bytes, std::string& why_not) const;

  // Empty where memory can be shared; else which rank cannot, and why. The same on all ranks.
  const std::string& why_not() const { return why_not_; }

  // Ranks ascend. Hosts are in the order of their first ranks, and the same on all ranks.
  using Ranks = std::vector<int64_t>;
  const Ranks& ranks() const { return hosts_[place_]; }  // of this one's host
  const std::vector<Ranks>& hosts() const { return hosts_; }

  // Whether the rank, of this host, has ended, or has let go of what it synchronised.
  bool has_left(int64_t rank) const { return !SharedMemory::is_open_at(presences_[rank]); }

 private:
  std::string why_not_;
  std::vector<Ranks> hosts_;
  size_t place_ = 0;
  Descriptor presence_;                 // a file that is open while this rank is there
  std::vector<std::string> presences_;  // where each rank's is
};

// The group's CPU ranks by host, as above, found out by all ranks together; none where they cannot share memory.
std::vector<Host::Ranks> hosts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace fastsync
