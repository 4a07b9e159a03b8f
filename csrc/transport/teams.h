// The teams that a group's ranks form: all of them, and on two levels those that are near each other, with their
// counterparts elsewhere.
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
  int64_t num_local_ranks = 0;  // of each node that have counterparts on all others: its first ones
  int64_t num_ranks = 0;        // of all nodes
  int64_t most_ranks = 0;       // of one node
  std::shared_ptr<Team> node;   // this rank's
  std::shared_ptr<Team> peers;  // its counterparts, by node; null where it has none
};

// The nodes' ranks ascend.
Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes);

// Nodes of so many ranks that follow each other.
std::vector<std::vector<int64_t>> nodes_of(int64_t ranks_per_node, int64_t num_ranks);

class Teams {
 public:
  Teams(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

  const std::shared_ptr<Team>& all() const { return all_; }

  // False once ranks have found out that they cannot share memory. Until then hosts and make_room may wait for all
  // ranks, in one sync.
  bool may_share() const { return may_share_; }
  // The hosts as levels, of which node shares memory once there is room. None where ranks cannot share memory.
  const Levels& hosts();
  // Whether each host has memory for so many bytes of each rank; or else need not try to have it.
  bool has_room(int64_t bytes) const { return !may_share_ || (shared_ && bytes <= shared_->region_bytes()); }
  void make_room(int64_t bytes);
  std::string why_not_shared() const { return host_ ? host_->why_not() : ""; }

  // This rank's host's, in shared memory; null where there is none.
  const std::shared_ptr<SharedTeam>& shared() const { return shared_; }
  int64_t num_hosts() const { return hosts_.num_nodes; }
  // Whether hosts are nodes of so many ranks.
  bool hosts_have(int64_t ranks_per_node) const;

 private:
  std::shared_ptr<Team> all_;
  bool may_share_;  // until a try has failed
  std::shared_ptr<Host> host_;
  std::shared_ptr<SharedTeam> shared_;
  Levels hosts_;
};

}  // namespace fastsync
