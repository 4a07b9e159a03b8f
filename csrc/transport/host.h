// Which ranks of a group are processes of one host: found out by trying, agreed on by all.
//
// Note [Sharing memory with processes that nobody forked]
// Memory has no name, so that nothing of it is left, however processes end: one of them makes it (memfd_create) and
// hands it to the others through a socket. At first each rank listens at a random name and tells it to all through the
// process group. Then it connects to the first rank that it reaches. Who reaches the same rank is on one host; that
// rank hands out the memory from then on. The system tells of each connection whose process made it, so that no other
// user's comes in.
// After each step all ranks vote, those too where something was thrown. So nobody waits for who cannot go on, and what
// one step sends is there in the next.
// The first memory is for locks (fcntl(2)): each rank holds one, which the system takes away when its process ends,
// and which children do not get. Whoever waits looks at them. Containers that have their own process ids or users do
// not matter to locks, as they would to kill(2) or /proc.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory.h"
#include "transport/unix_socket.h"

namespace fastsync {

// The group's time-out. A backend around another one may not tell: then PyTorch's default.
std::chrono::milliseconds limit_of(c10d::ProcessGroup& group);

// One for each group in a process, while anybody uses it. Thread-safe between its ranks' common calls.
class Host {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // What keeps this process from sharing memory with any other; empty where nothing does.
  static std::string obstacle();
  // Throws c10::ValueError where FASTSYNC_SHARED_MEMORY is set to something that says neither yes nor no.
  static void check_setting();

  // This and the next are for all ranks together, at the same place between their collectives.
  static std::shared_ptr<Host> of(const Group& group);
  // Memory of so many bytes for each host's ranks, each rank's part of which lies near it. Null where not every rank
  // could get it; `why_not` says why, on every rank.
  std::shared_ptr<SharedMemory> share(const Group& group, int64_t bytes, std::string& why_not);

  // Empty where memory can be shared; else which rank cannot, and why. The same on all ranks.
  const std::string& why_not() const { return why_not_; }

  // Ranks ascend. Hosts are in the order of their first ranks, and the same on all ranks.
  using Ranks = std::vector<int64_t>;
  const Ranks& ranks() const { return hosts_[place_]; }  // of this one's host
  const std::vector<Ranks>& hosts() const { return hosts_; }

  // Whether the rank's process has ended, or has let go of all that used its group.
  bool has_left(int64_t rank) const;

 private:
  explicit Host(const Group& group);
  void find_hosts(const std::vector<std::string>& firsts, int64_t rank);
  bool is_first(const Group& group) const { return group->getRank() == ranks().front(); }
  void hand_out(const Descriptor& memory) const;

  std::string id_;
  std::string why_not_;
  std::vector<Ranks> hosts_;
  size_t place_ = 0;
  std::vector<Descriptor> connections_;  // of a host's first rank to the others, of another one to the first
  Descriptor locks_;                     // memory in which each rank of this host holds a lock
};

// The group's CPU ranks by host, as above, found out by all ranks together; none where they cannot share memory.
std::vector<Host::Ranks> hosts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace fastsync
