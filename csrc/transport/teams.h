// The teams that a group's ranks form: one team of all ranks, or two levels of teams. On two levels a rank is in the
// team of its node, and in the team of its peers on the other nodes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/shared_team.h"
#include "transport/team.h"

namespace fastsync {

// The two levels. A node is a host, or a number of consecutive ranks that the user has chosen.
struct Levels {
  int64_t num_nodes = 0;
  int64_t num_local_ranks = 0;  // how many ranks the smallest node has: only so many of a node's ranks have peers
  int64_t num_ranks = 0;        // how many ranks all nodes have
  int64_t most_ranks = 0;       // how many ranks the largest node has
  std::shared_ptr<Team> node;   // the ranks of this rank's node
  std::shared_ptr<Team> peers;  // the rank with this rank's index on each node; null if not every node has one
};

// Makes the levels of these nodes; none of no nodes. Each node's ranks must ascend.
Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes);

// Makes nodes of ranks_per_node consecutive ranks each.
std::vector<std::vector<int64_t>> nodes_of(int64_t ranks_per_node, int64_t num_ranks);

class Teams {
 public:
  // `what` the ranks send each other is for errors.
  Teams(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::string what = "gradients");

  const std::shared_ptr<Team>& all() const { return all_; }

  // Whether ranks can share memory, or do not know yet that they cannot. While it is true, hosts and make_room may wait
  // for all ranks, so all ranks have to call them in the same sync.
  bool can_share() const { return all_->messages_are_fast() && all_->size() > 1 && why_not_shared_.empty(); }
  // The levels whose nodes are the hosts. Their team `node` shares memory once there is room. There are no nodes if
  // ranks cannot share memory.
  const Levels& hosts();
  // Whether each host has memory for so many bytes of each rank, or cannot have it. Then nobody needs to call
  // make_room.
  bool has_room(int64_t bytes) const { return !can_share() || (shared_ && bytes <= shared_->region_bytes()); }
  // Makes the team in shared memory anew, with so many bytes for each rank. If that fails, why_not_shared tells why.
  void make_room(int64_t bytes);
  // Which rank cannot share memory, and why. Empty if no rank has tried in vain.
  const std::string& why_not_shared() const { return why_not_shared_; }

  // The team of this rank's host, in shared memory. Null if there is none.
  const std::shared_ptr<SharedTeam>& shared() const { return shared_; }
  // Tells the ranks that share memory that this rank sends no more. They would not notice it by the process group.
  void give_up() const {
    if (shared_) {
      shared_->regions()->give_up();
    }
  }
  int64_t num_hosts() const { return hosts_.num_nodes; }
  // Whether the hosts are known, and are the same nodes as nodes_of makes.
  bool hosts_have(int64_t ranks_per_node) const;

 private:
  const std::string what_;
  std::shared_ptr<Team> all_;
  std::shared_ptr<const Host> host_;  // null until hosts() was called
  Levels hosts_;
  std::shared_ptr<SharedTeam> shared_;
  std::string why_not_shared_;
};

}  // namespace fastsync
