// Short messages of all ranks to all, in memory that they share. For one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/shared_team.h"

namespace fastsync {

class SharedGather {
 public:
  // Null where not all ranks of the group share memory. For all of them together.
  static std::shared_ptr<SharedGather> of(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // Every rank's message, in rank order. Throws c10::Error where one is lost, or does not come within the group's
  // time-out.
  std::vector<std::string> all_gather(const std::string& message);

 private:
  explicit SharedGather(std::shared_ptr<SharedTeam> team);
  std::vector<std::string> gather(const std::string& message);

  std::shared_ptr<SharedTeam> team_;
  at::Tensor memory_;
};

}  // namespace fastsync
