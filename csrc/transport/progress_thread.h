// Where what follows on an arrival is done, so that nothing else has to wait for it: on a CPU a thread of the engine's,
// on CUDA the engine's own stream beside backward's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>

namespace fastsync {

// On a CPU its thread begins with the first task and ends some time after the progress, with the last task: nobody
// waits for it. Tasks must not throw and must not hold anything that may only end on another thread.
class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // On a CPU one after the other, every urgent one before any that can wait. On CUDA, where nothing waits but a stream,
  // at once, on a stream that first waits for what the current one has been given so far.
  void post(c10::Device device, std::function<void()> task, bool is_urgent = false);

 private:
  struct Queues;

  std::shared_ptr<Queues> queues_;
  pid_t process_id_;
};

// On a thread of the process that nobody waits for, calls a wait for what is under way on a CPU, and only then lets go
// of it with what it holds: a process group, too, which may then end there. What the wait throws is no error any more.
void wait_in_background(std::function<void()> wait);

c10::Stream current_stream(c10::Device device);

// The place that the current stream has reached when it is marked, for another one to wait for. Nothing on a CPU.
class StreamMark {
 public:
  void set(c10::Device device);
  void wait() const;

 private:
  std::optional<c10::Event> event_;
};

// The memory, which may have been another stream's, is used on the current one: it stays until that is done.
void use_on_current_stream(const at::Tensor& tensor);

// Of a tensor on the device.
c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::Device device);

}  // namespace fastsync
