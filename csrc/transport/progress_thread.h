// A ProgressThread does what follows when rows have come, so that backward does not wait for it. On a CPU it is a
// thread of the engine. On CUDA there is no thread: tasks go to the engine's own stream, beside backward's.
#pragma once

#include <c10/core/Device.h>
#include <sys/types.h>

#include <functional>
#include <memory>

namespace fastsync {

// On a CPU its thread begins with the first task. When this object ends, nobody waits for the thread: it does the tasks
// that are left, and then ends too. Tasks must not throw, nor hold anything that must be destroyed on another thread.
class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // On a CPU tasks run one after the other, and urgent ones first. Throws std::system_error, and drops the task, if
  // there is no thread and none can be started. On CUDA a task runs at once, on a stream that first
  // waits for what the current stream has been given so far.
  void post(c10::Device device, std::function<void()> task, bool is_urgent = false);

 private:
  struct Queues;

  std::shared_ptr<Queues> queues_;
  pid_t process_id_;
};

// Calls the function on a thread that nobody waits for, and ignores what it throws. Then it destroys the function and
// what that holds: messages under way on a CPU, and perhaps the last reference to a process group.
void wait_in_background(std::function<void()> wait);

}  // namespace fastsync
