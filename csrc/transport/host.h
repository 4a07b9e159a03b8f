// The ranks of a group find out which of them are on one host, and share memory there.
//
// Note [Sharing memory with processes that nobody forked]
// The memory has no name in a file system, so nothing of it is left, however processes end. The first rank of a host
// makes it (memfd_create). The others open it as /proc/PID/fd/NUMBER, which the system allows to the same user alone,
// and the process group tells them this path. Ranks are on one host if they name the same machine, namespaces and user.
// Ranks vote three times: when they have named their hosts, made memory, and opened it. A rank votes even if its part
// has failed, so no rank waits for one that cannot go on. A process keeps the memory's file open until all others have
// opened it.
// Ranks take the first vote once for a group, and the others for each bucket, because memory is as large as a bucket
// needs.
// A rank that waits for another rank looks in /proc whether that rank's process is still there.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory.h"

namespace fastsync {

// All ranks of a group throw it, with the same reason, if one of them cannot do its part.
struct CannotShare {
  std::string why;
};

// A Host is the host of this rank. It also knows the hosts of the group's other ranks.
class Host {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
  using Ranks = std::vector<int64_t>;
  // Tells all ranks this rank's text, and returns every rank's, in rank order. It is a collective.
  using Exchange = std::function<std::vector<std::string>(const std::string& text)>;

  // The reason why this process cannot share memory with any other process; empty if it can.
  static std::string obstacle();
  // Throws c10::ValueError if FASTSYNC_SHARED_MEMORY is neither 0 nor 1.
  static void check_setting();

  // The next methods are collectives, which all ranks call in the same order.

  // Returns the group's Host, which ranks find out once and keep for as long as the group lives. An engine must not own
  // it: engines end at different times, and a rank that had to find out again would wait in vain.
  static std::shared_ptr<const Host> of(const Group& group);
  // Makes memory of so many bytes, which the ranks of a host share. Each rank's part of it is near that rank's core.
  // Throws CannotShare.
  std::shared_ptr<SharedMemory> share(const Group& group, int64_t bytes) const;
  std::shared_ptr<SharedMemory> share(const Exchange& exchange, int64_t bytes) const;

  // The ranks of each host, ascending. Hosts are in the order of their first ranks, and the same on all ranks. Empty if
  // ranks cannot share memory.
  const std::vector<Ranks>& hosts() const { return hosts_; }
  const Ranks& ranks() const { return ranks_; }  // the ranks of this rank's host
  int64_t rank() const { return rank_; }         // this rank, in the group

  // Whether the process of a rank has ended. The rank must be on this rank's host.
  bool has_ended(int64_t rank) const;

  explicit Host(const Group& group);
  // For ranks that have no group yet.
  Host(int64_t rank, const Exchange& exchange);

 private:
  const int64_t rank_;
  std::string why_not_;  // the reason why ranks cannot share memory; empty if they can
  std::vector<Ranks> hosts_;
  Ranks ranks_;
  std::vector<std::string> processes_;  // each rank's process: its number, and when it began
};

// A backend whose ranks have found out their hosts when they made it.
class HasHost {
 public:
  virtual ~HasHost() = default;
  // Null if ranks cannot share memory.
  virtual std::shared_ptr<const Host> host() const = 0;
};

// Returns the ranks of each host, or nothing if they cannot share memory on the CPU. It is a collective, as Host::of
// is.
std::vector<Host::Ranks> hosts_of(const Host::Group& group);

}  // namespace fastsync
