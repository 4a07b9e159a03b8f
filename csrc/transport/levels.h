// The two levels of a group: ranks that are near each other, and their counterparts elsewhere.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/team.h"

namespace fastsync {

struct Levels {
  int64_t num_nodes = 0;
  int64_t num_lanes = 0;        // ranks of each node that have counterparts on all others: its first ones
  int64_t num_ranks = 0;        // of all nodes
  int64_t most_ranks = 0;       // of one node
  std::shared_ptr<Team> node;   // this rank's
  std::shared_ptr<Team> peers;  // of its lane, by node; null where it has none
};

// The nodes' ranks ascend.
Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes);

// Nodes of so many ranks that follow each other.
std::vector<std::vector<int64_t>> nodes_of(int64_t ranks_per_node, int64_t num_ranks);

}  // namespace fastsync
