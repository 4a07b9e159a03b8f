// To which backward something belongs that was begun in it, and what becomes of it where that backward fails. Knows
// nothing of what it is.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace fastsync {

constexpr int kNoGraphTask = -1;

// The graph task that this thread is in; kNoGraphTask outside of any backward.
int current_graph_task();

// Of one that begins something in backwards. Any thread may ask.
class Backward {
 public:
  // is_under_way: whether something has begun that has not ended; from any thread. end: the graph task has ended, and
  // with it what belongs to it. give_up: a backward has failed; called once, whoever has entered it.
  Backward(std::function<bool()> is_under_way, void (*end)(int), void (*give_up)())
      : is_under_way_(std::move(is_under_way)), end_(end), give_up_(give_up) {}

  // Inside a backward, before something begins or goes on: from now on it belongs to this graph task, or, where that
  // runs inside another one's node, as a reentrant checkpoint's does, to what comes after it there.
  static void enter(const std::shared_ptr<Backward>& self);
  // Outside of any: it belongs to whoever holds the result.
  std::shared_ptr<void> own();

  // Something is under way that nobody will end.
  bool is_interrupted() const;
  bool ends_with(int graph_task) const;

 private:
  struct Token;

  static bool outer_will_end(const std::shared_ptr<Backward>& self);
  std::shared_ptr<Token> new_token(int graph_task);

  const std::function<bool()> is_under_way_;
  void (*const end_)(int);
  void (*const give_up_)();

  // Other threads ask whose backward is under way. If they had to wait until this one's ranks have met, ranks on which
  // threads come in different orders would wait for each other: so this is never held while anything waits.
  mutable std::mutex mutex_;
  std::weak_ptr<void> owner_;  // expires when the backward under way does, ended or not: whoever will end it holds it
  int graph_task_ = kNoGraphTask;  // the newest that will call end
};

}  // namespace fastsync
