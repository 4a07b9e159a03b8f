// Questions and answers between the ranks of a group, through its store: where is everybody?
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fastsync {

// What calls the store may throw, and may hang where another process holds it. Not thread-safe, but for what is const.
class RollCallStore {
 public:
  // One that a thread may use that never has the GIL: a store may also be Python's.
  static bool is_usable(const c10::intrusive_ptr<c10d::Store>& store);

  explicit RollCallStore(const c10d::ProcessGroup& group);
  ~RollCallStore();
  RollCallStore(const RollCallStore&) = delete;
  RollCallStore& operator=(const RollCallStore&) = delete;

  // Connects, the first time. Throws where the store is gone.
  void connect();
  void disconnect();

  int64_t size() const { return size_; }

  // Whether a rank has asked something that this one has not answered.
  bool is_asked();
  void answer(const std::string& where);
  // An answer for those who ask when this rank is gone.
  void leave(const std::string& where);

  // Asks, or joins a question that another rank has just asked; and whether all have answered it.
  void ask();
  bool have_all_answered() { return have_answered(0, size_); }
  // Which ranks have not answered, and what the others have: the ends of an error.
  std::string answers();
  std::string why_none() const;

 private:
  class Server;

  std::string answer_key(int64_t rank) const;
  bool have_answered(int64_t first, int64_t last);
  void find_silent(int64_t first, int64_t last, std::vector<int64_t>& silent);
  std::string get(const std::string& key);
  std::string names(const std::vector<int64_t>& ranks) const;

  const int64_t rank_;
  const int64_t size_;
  const std::vector<uint64_t> global_ranks_;  // empty where they are the same, or not known
  const bool has_server_;
  c10::intrusive_ptr<c10d::Store> store_;  // the group's; once connected, one of its own
  std::unique_ptr<Server> server_;
  bool is_connected_ = false;
  int64_t num_questions_ = 0;  // so far
  std::chrono::steady_clock::time_point asked_at_;
};

}  // namespace fastsync
