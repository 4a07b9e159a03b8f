// A process group's store, for a thread that must neither wait for others who use it nor make it warn.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace fastsync {

class StoreConnection {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  // Whether the store can be used without the GIL and by other processes: a store may also be written in Python.
  static bool can_use(const StorePtr& store);

  // Takes what can_use. A TCPStore gets a connection of its own, because the group's is held for as long as somebody
  // waits in it, as dist.new_group() does.
  explicit StoreConnection(const StorePtr& store);
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  // The store, for one call or a few. Throws c10::Error if it is gone.
  StorePtr store() const;

  // The values of these keys, which are empty if nobody has set them.
  std::vector<std::string> get(const std::vector<std::string>& keys) const;

  // A FileStore keeps all that was ever written. So it is written to only when somebody asks.
  bool is_file() const { return is_file_; }

 private:
  const c10::weak_intrusive_ptr<c10d::Store> group_store_;  // it may have a server that has to end with the group
  StorePtr client_;                                         // our own; null where the group's store is used
  int server_ = -1;  // a descriptor of a connection to the TCPStore's server; below 0 where there is none
  bool is_file_;
};

}  // namespace fastsync
