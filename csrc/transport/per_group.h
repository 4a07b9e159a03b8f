// A map from process groups to values. It does not keep the groups alive.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <list>
#include <utility>

namespace fastsync {

// Not thread-safe.
template <class Value>
class PerGroup {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // The group's value, a default one at first. It stays where it is for as long as the group lives.
  Value& operator[](const Group& group) {
    std::erase_if(entries_, [](const Entry& entry) { return entry.first.expired(); });
    const auto is_of_group = [&](const Entry& entry) { return entry.first._unsafe_get_target() == group.get(); };
    const auto found = std::find_if(entries_.begin(), entries_.end(), is_of_group);
    return found != entries_.end() ? found->second : entries_.emplace_back(group, Value()).second;
  }

  // Makes a call with the value of each group that lives.
  template <class Call>
  void for_each(const Call& call) const {
    for (const auto& [group, value] : entries_) {
      if (!group.expired()) {
        call(value);
      }
    }
  }

 private:
  using Entry = std::pair<c10::weak_intrusive_ptr<c10d::ProcessGroup>, Value>;

  std::list<Entry> entries_;
};

}  // namespace fastsync
