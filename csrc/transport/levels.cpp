#include "transport/levels.h"

#include <algorithm>
#include <utility>

namespace fastsync {

Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes) {
  Levels levels{static_cast<int64_t>(nodes.size()), whole.size(), whole.size(), 0, nullptr, nullptr};
  int64_t lane = 0;
  for (const auto& ranks : nodes) {
    levels.num_lanes = std::min(levels.num_lanes, static_cast<int64_t>(ranks.size()));
    levels.most_ranks = std::max(levels.most_ranks, static_cast<int64_t>(ranks.size()));
    const auto place = std::find(ranks.begin(), ranks.end(), whole.group()->getRank());
    if (place == ranks.end()) {
      continue;
    }
    lane = place - ranks.begin();
    levels.node = std::make_shared<Team>(whole.group(), whole.device(), ranks);
  }
  if (lane < levels.num_lanes) {
    std::vector<int64_t> peers;
    for (const auto& ranks : nodes) {
      peers.push_back(ranks[lane]);
    }
    levels.peers = std::make_shared<Team>(whole.group(), whole.device(), std::move(peers));
  }
  return levels;
}

std::vector<std::vector<int64_t>> nodes_of(int64_t ranks_per_node, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> nodes(num_ranks / ranks_per_node);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    nodes[rank / ranks_per_node].push_back(rank);
  }
  return nodes;
}

}  // namespace fastsync
