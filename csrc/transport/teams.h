// The teams that a group's ranks form: all ranks together, or on two levels the ranks of a node, and their peers on
// other nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/shared_team.h"
#include "transport/team.h"

namespace fastsync {

struct Levels {
  int64_t num_nodes = 0;
  int64_t num_local_ranks = 0;  // of the smallest node: so many of each node's ranks have a peer on every other node
  int64_t num_ranks = 0;        // of all nodes
  int64_t most_ranks = 0;       // of the largest node
  std::shared_ptr<Team> node;   // the ranks of this rank's node
  std::shared_ptr<Team> peers;  // the rank with this rank's index on each node; null if not every node has one
};

// The ranks of each node ascend.
Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes);

// Nodes of so many consecutive ranks.
std::vector<std::vector<int64_t>> nodes_of(int64_t ranks_per_node, int64_t num_ranks);

class Teams {
 public:
  Teams(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

  const std::shared_ptr<Team>& all() const { return all_; }

  // False once ranks have found out that they cannot share memory. Until then hosts and make_room may wait for all
  // ranks, which call them in the same sync.
  bool can_share() const { return all_->sends_at_once() && all_->size() > 1 && why_not_shared_.empty(); }
  // The hosts as levels, whose node shares memory once there is room. No nodes if ranks cannot share memory.
  const Levels& hosts();
  // Whether make_room need not be called: each host has memory for so many bytes of each rank, or cannot have it.
  bool has_room(int64_t bytes) const { return !can_share() || (shared_ && bytes <= shared_->region_bytes()); }
  void make_room(int64_t bytes);
  // Which rank cannot share memory, and why. Empty if none has tried in vain.
  const std::string& why_not_shared() const { return why_not_shared_; }

  // The team of this rank's host, in shared memory. Null if there is none.
  const std::shared_ptr<SharedTeam>& shared() const { return shared_; }
  int64_t num_hosts() const { return hosts_.num_nodes; }
  // Whether hosts are nodes of so many ranks.
  bool hosts_have(int64_t ranks_per_node) const;

 private:
  std::shared_ptr<Team> all_;
  std::shared_ptr<const Host> host_;  // null until hosts() was called
  Levels hosts_;
  std::shared_ptr<SharedTeam> shared_;
  std::string why_not_shared_;
};

}  // namespace fastsync
