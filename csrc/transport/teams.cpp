#include "transport/teams.h"

#include <algorithm>
#include <utility>

namespace fastsync {

Levels levels_of(const Team& whole, const std::vector<std::vector<int64_t>>& nodes) {
  if (nodes.empty()) {
    return {};
  }
  Levels levels{static_cast<int64_t>(nodes.size()), whole.size(), whole.size(), 0, nullptr, nullptr};
  int64_t local_rank = 0;
  for (const auto& ranks : nodes) {
    levels.num_local_ranks = std::min(levels.num_local_ranks, static_cast<int64_t>(ranks.size()));
    levels.most_ranks = std::max(levels.most_ranks, static_cast<int64_t>(ranks.size()));
    const auto own = std::find(ranks.begin(), ranks.end(), whole.group()->getRank());
    if (own != ranks.end()) {
      local_rank = own - ranks.begin();
      levels.node = std::make_shared<Team>(whole.group(), whole.device(), ranks);
    }
  }
  if (local_rank < levels.num_local_ranks) {
    std::vector<int64_t> peers;
    for (const auto& ranks : nodes) {
      peers.push_back(ranks[local_rank]);
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

Teams::Teams(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::string what)
    : what_(std::move(what)), all_(make_team(std::move(group), device)) {}

const Levels& Teams::hosts() {
  if (can_share() && !host_) {
    host_ = Host::of(all_->group());
    hosts_ = levels_of(*all_, host_->hosts());
  }
  return hosts_;
}

void Teams::make_room(int64_t bytes) {
  hosts_ = levels_of(*all_, host_->hosts());  // again, because `node` still is the team in shared memory
  shared_.reset();
  try {
    shared_ = std::make_shared<SharedTeam>(all_->group(), std::make_shared<SharedRegions>(all_->group(), host_, bytes),
                                           what_);
    hosts_.node = shared_;
  } catch (const CannotShare& failure) {
    why_not_shared_ = failure.why;
  }
}

bool Teams::hosts_have(int64_t ranks_per_node) const {
  return host_ && host_->hosts() == nodes_of(ranks_per_node, all_->size());
}

}  // namespace fastsync
