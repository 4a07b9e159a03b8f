#include "transport/progress_thread.h"

#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace fastsync {

namespace {

// Returns the engine's own stream. It is always the same, because another stream of the pool might be the user's or the
// process group's.
c10::Stream side_stream(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> streams;
  const std::pair key(device.type(), device.index());
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams.find(key);
  if (found != streams.end()) {
    return found->second;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return streams.emplace(key, guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)).first->second;
}

// Makes torch and the passes use no other threads when this thread calls them. Otherwise it would get OpenMP threads of
// its own, which would fight with backward's threads for the cores. Torch sets a thread's number of threads before the
// first parallel region, once in libtorch and once in code that is inlined here. So this makes torch do both first.
void use_one_thread() {
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  omp_set_num_threads(1);
}

}  // namespace

struct ProgressThread::Queues {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> urgent;
  std::deque<std::function<void()>> others;
  bool has_thread = false;
  bool is_closed = false;

  // Waits for the next task. Returns an empty function if no task is left and the queues are closed.
  std::function<void()> next() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_closed || !urgent.empty() || !others.empty(); });
    auto& queue = urgent.empty() ? others : urgent;
    if (queue.empty()) {
      return {};
    }
    auto task = std::move(queue.front());
    queue.pop_front();
    return task;
  }
};

ProgressThread::ProgressThread() : queues_(std::make_shared<Queues>()), process_id_(getpid()) {}

ProgressThread::~ProgressThread() {
  if (getpid() != process_id_) {
    return;  // a forked child has no such thread, and the mutex may be locked for ever
  }
  {
    const std::lock_guard<std::mutex> lock(queues_->mutex);
    queues_->is_closed = true;
  }
  queues_->changed.notify_one();
}

void ProgressThread::post(c10::Device device, std::function<void()> task, bool is_urgent) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    c10::Event given(device.type());
    given.record(guard.getStream(device));
    const c10::StreamGuard beside(side_stream(device));
    given.block(beside.current_stream());
    task();
    return;
  }
  if (getpid() != process_id_) {  // a forked child gets a thread of its own, and the parent's tasks stay undone
    queues_ = std::make_shared<Queues>();
    process_id_ = getpid();
  }
  {
    const std::lock_guard<std::mutex> lock(queues_->mutex);
    if (!queues_->has_thread) {
      std::thread([queues = queues_] {
        pthread_setname_np(pthread_self(), "fastsync");
        use_one_thread();
        while (const auto next = queues->next()) {
          next();
        }
      }).detach();
      queues_->has_thread = true;
    }
    (is_urgent ? queues_->urgent : queues_->others).push_back(std::move(task));
  }
  queues_->changed.notify_one();
}

// The thread never ends. If it cannot be started, the function is never destroyed.
void wait_in_background(std::function<void()> wait) {
  static auto* const progress = new ProgressThread();
  auto* const kept = new std::function(std::move(wait));
  try {
    progress->post(c10::kCPU, [kept] {
      try {
        (*kept)();
      } catch (const std::exception&) {
      }
      delete kept;
    });
  } catch (const std::exception&) {
  }
}

}  // namespace fastsync
