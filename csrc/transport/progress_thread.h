// Work that follows on an arrival is done here, so that nothing else waits for it: on a CPU by a thread of the engine,
// and on CUDA on the engine's own stream beside backward's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>

namespace fastsync {

// On a CPU its thread begins with the first task. When this object ends, the thread does what is left and ends too, and
// nobody waits for it. Tasks must not throw, and must not hold anything that may only end on another thread.
class ProgressThread {
 public:
  ProgressThread();
  ~ProgressThread();
  ProgressThread(const ProgressThread&) = delete;
  ProgressThread& operator=(const ProgressThread&) = delete;

  // On a CPU tasks run one after the other, and urgent ones first. On CUDA a task runs at once, on a stream that first
  // waits for what the current stream has been given so far.
  void post(c10::Device device, std::function<void()> task, bool is_urgent = false);

 private:
  struct Queues;

  std::shared_ptr<Queues> queues_;
  pid_t process_id_;
};

// Calls the wait on a thread that nobody waits for, then lets go of the function and what it holds: messages under way
// on a CPU, and perhaps a process group, which may then end there. What the wait throws is ignored.
void wait_in_background(std::function<void()> wait);

c10::Stream current_stream(c10::Device device);

// Marks how far the current stream has got, so that another stream can wait for that. Does nothing on a CPU.
class StreamMark {
 public:
  void set(c10::Device device);
  void wait() const;

 private:
  std::optional<c10::Event> event_;
};

// Keeps the tensor's memory until what the current stream does with it is done, even if another stream allocated it.
void use_on_current_stream(const at::Tensor& tensor);

// A future of a tensor on the device.
c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::Device device);

}  // namespace fastsync
