// Gives a thread access to a process group's store. The thread neither waits for others who use the store nor makes the
// store warn.
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

  // Takes a store that can_use. A TCPStore gets a connection of its own, because the group's connection is held for as
  // long as somebody waits in it, as dist.new_group() does.
  explicit StoreConnection(const StorePtr& store);
  ~StoreConnection();
  StoreConnection(const StoreConnection&) = delete;
  StoreConnection& operator=(const StoreConnection&) = delete;

  // Returns the store, for one call or a few. Throws c10::Error if it is gone.
  StorePtr store() const;

  // Returns the values of these keys. A value is empty if nobody has set it.
  std::vector<std::string> get(const std::vector<std::string>& keys) const;

  // Whether it is a FileStore. That keeps all that was ever written, so it is written to only when somebody asks.
  bool is_file() const { return is_file_; }

 private:
  const c10::weak_intrusive_ptr<c10d::Store> group_store_;  // it may have a server that has to end with the group
  StorePtr client_;                                         // our own; null where the group's store is used
  int server_ = -1;  // a descriptor of a connection to the TCPStore's server; below 0 where there is none
  bool is_file_;
};

}  // namespace fastsync
