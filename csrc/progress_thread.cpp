#include "progress_thread.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace fastsync {

struct ProgressThread::Queues {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> urgent;
  std::deque<std::function<void()>> others;
  bool has_thread = false;
  bool is_closed = false;

  // An empty function once there is nothing left to do, and nobody left to say what.
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
    return;  // the thread stayed behind in the process that this one was forked from, perhaps with the mutex
  }
  {
    const std::lock_guard<std::mutex> lock(queues_->mutex);
    queues_->is_closed = true;
  }
  queues_->changed.notify_one();
}

void ProgressThread::post_urgent(std::function<void()> task) { post_to(/*is_urgent=*/true, std::move(task)); }

void ProgressThread::post(std::function<void()> task) { post_to(/*is_urgent=*/false, std::move(task)); }

void ProgressThread::post_to(bool is_urgent, std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(queues_->mutex);
    (is_urgent ? queues_->urgent : queues_->others).push_back(std::move(task));
    if (!std::exchange(queues_->has_thread, true)) {
      std::thread thread([queues = queues_] {
        pthread_setname_np(pthread_self(), "fastsync");
        while (const auto task = queues->next()) {
          task();
        }
      });
      thread.detach();
    }
  }
  queues_->changed.notify_one();
}

}  // namespace fastsync
