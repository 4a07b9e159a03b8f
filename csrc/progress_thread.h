// A thread that does what follows on the arrival of messages, so that it need not wait until somebody asks.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>

namespace fastsync {

// Begins with the first task and ends some time after its owner, with its last task: nobody waits for it. Tasks must
// not throw and must not hold anything that may only end on another thread.
class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // One after the other; every urgent one before any that can wait.
  void post_urgent(std::function<void()> task);
  void post(std::function<void()> task);

 private:
  struct Queues;
  void post_to(bool is_urgent, std::function<void()> task);

  std::shared_ptr<Queues> queues_;
  pid_t process_id_;
};

}  // namespace fastsync
