#include "transport/shared_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastsync {

namespace {

// A rank's row: how long its message is, and as much of it as there is room for at once.
constexpr int64_t kRowBytes = 1 << 16;
constexpr size_t kMessageBytes = kRowBytes - sizeof(uint64_t);

}  // namespace

std::shared_ptr<SharedGather> SharedGather::of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (!make_team(group, c10::kCPU)->sends_at_once()) {
    return nullptr;
  }
  std::string why_not;
  auto team = SharedTeam::make(group, std::make_shared<Host>(group), kRowBytes, why_not, "message");
  const bool is_whole = team && team->size() == group->getSize();
  return std::shared_ptr<SharedGather>(is_whole ? new SharedGather(std::move(team)) : nullptr);
}

SharedGather::SharedGather(std::shared_ptr<SharedTeam> team)
    : team_(std::move(team)), memory_(team_->allocate(kRowBytes)) {}

std::vector<std::string> SharedGather::all_gather(const std::string& message) {
  try {
    return gather(message);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "fastsync: rank ", team_->rank(), " of ", team_->size(),
                " could not hear from all ranks: ", error.what_without_backtrace());
  }
}

std::vector<std::string> SharedGather::gather(const std::string& message) {
  const Rows rows{0, kRowBytes, kRowBytes};
  auto* const data = static_cast<char*>(memory_.data_ptr());
  std::vector<std::string> messages(team_->size());
  uint64_t longest = 1;
  for (uint64_t begin = 0; begin < longest; begin += kMessageBytes) {
    team_->begin(/*attempt=*/0);
    const auto use = team_->use_rows();
    const auto transfer = team_->all_gather(memory_, rows, /*tag=*/0);
    const uint64_t own_length = message.size();
    char* const own = data + rows.begin(team_->rank());
    std::memcpy(own, &own_length, sizeof(own_length));
    if (begin < message.size()) {
      std::memcpy(own + sizeof(own_length), message.data() + begin, std::min(message.size() - begin, kMessageBytes));
    }
    transfer->send();
    transfer->wait_for_rows();
    for (int64_t rank = 0; rank < team_->size(); ++rank) {
      const char* const row = data + rows.begin(rank);
      uint64_t length = 0;
      std::memcpy(&length, row, sizeof(length));
      longest = std::max(longest, length);
      if (begin < length) {
        messages[rank].append(row + sizeof(length), std::min<uint64_t>(length - begin, kMessageBytes));
      }
    }
    team_->have_read();
  }
  return messages;
}

}  // namespace fastsync
