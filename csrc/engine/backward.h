// Backward knows which backward ends a sync, and what happens if that backward fails.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace fastsync {

constexpr int kNoGraphTask = -1;

// The graph task that this thread is in; kNoGraphTask outside of any backward.
int current_graph_task();

// Note [Who ends a sync]
//   A sync that is under way has an owner, which will end it. There are three kinds of owners:
//     graph task   It runs a backward, and a callback of it calls `on_end` when the backward has ended. If the backward
//                  fails, Autograd destroys that callback without calling it.
//     node         A backward has ended inside this node of an outer one, as in a reentrant checkpoint. More gradients
//                  may come from the outer one. So the node owns the sync until the nodes after it run, which make the
//                  outer graph task the owner.
//     caller       It ends the sync itself, outside of any backward.
//   An owner that goes away before the sync has ended leaves it interrupted.
//
//   If a backward fails, `on_failure` is called once for all engines that have entered it. If it ran inside another
//   backward, `on_failure` is called only when that one ends.

// Knows the owner of one engine's sync, see Note [Who ends a sync]. Any thread may ask it.
class Backward {
 public:
  // is_under_way tells whether a sync has begun and not ended. Any thread calls it. `on_end` gets the graph task that
  // has ended.
  Backward(std::function<bool()> is_under_way, void (*on_end)(int), void (*on_failure)())
      : is_under_way_(std::move(is_under_way)), on_end_(on_end), on_failure_(on_failure) {}

  // Makes the current graph task the owner. Call it before a sync begins, and before a sync goes on, unless is_entered.
  static void enter(const std::shared_ptr<Backward>& self);
  // Makes the caller the owner for as long as it keeps the result.
  std::shared_ptr<void> own();

  // Whether the graph task that this thread is in is the owner. It takes no lock.
  bool is_entered() const {
    const int graph_task = current_graph_task();
    return graph_task != kNoGraphTask && owner_graph_task_ == graph_task;
  }
  // Whether a sync is under way that nobody will end.
  bool is_interrupted() const;
  // Whether a sync is under way that this graph task owns.
  bool ends_with(int graph_task) const;

 private:
  struct GraphTask;

  static bool hand_to_outer(const std::shared_ptr<Backward>& self);
  bool is_owned_by(int graph_task) const;
  void set_owner(const std::shared_ptr<void>& owner, int graph_task);

  const std::function<bool()> is_under_way_;
  void (*const on_end_)(int);
  void (*const on_failure_)();

  // No thread holds it while it waits. Threads of several engines ask each other's Backward for the owner. If one of
  // them waited for other ranks meanwhile, ranks whose threads come in different orders would wait for each other.
  mutable std::mutex mutex_;
  std::weak_ptr<void> owner_;  // expires when the owner goes away
  // kNoGraphTask for a node or a caller. No two graph tasks have the same number.
  std::atomic<int> owner_graph_task_ = kNoGraphTask;
};

}  // namespace fastsync
