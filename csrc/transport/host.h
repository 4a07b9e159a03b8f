// Which ranks of a group are processes of one host: found out by trying, agreed on by all.
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
  bool has_left(int64_t rank) const { return connections_[static_cast<size_t>(rank)].has_ended(); }

 private:
  explicit Host(const Group& group);
  void find_hosts(const std::vector<std::string>& reached, size_t rank);

  std::string id_;
  std::string why_not_;
  std::vector<Ranks> hosts_;
  size_t place_ = 0;
  int64_t num_shared_ = 0;
  bool is_sharing_ = false;              // or has failed to, with the group
  std::vector<Connection> connections_;  // by rank, open to those of this host
};

// The group's CPU ranks by host, as above, found out by all ranks together; none where they cannot share memory.
std::vector<Host::Ranks> hosts_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace fastsync
