// What is under way in a group, and the queue in which its collectives run one after the other.
//
// Note [Who runs a collective]
// Collectives of a group run in the order in which they were called, one at a time. The progress thread runs those that
// nobody waits for. Who waits for a collective runs what is left before it, and the collective, on the own thread: to
// wake another thread would take longer than a small collective. So the progress thread hears nothing of a collective
// whose caller waits at once.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/progress_thread.h"

namespace fastsync {

// A collective or a message. Its future holds the outputs: a list of tensors, or of lists if there are several.
class HostWork : public c10d::Work {
 public:
  using Lists = std::vector<std::vector<at::Tensor>>;

  HostWork(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs, Lists outputs,
           uint64_t number);

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override;
  uint64_t getSequencenumber() const override { return number_; }

 protected:
  // Tells who waits, and calls who has asked to be called.
  void complete(const std::exception_ptr& error);

 private:
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error) const;

  const Lists outputs_;
  const uint64_t number_;
  std::mutex future_mutex_;                         // guards the next
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // null until somebody asks for it
  bool is_settled_ = false;
  std::exception_ptr error_;
};

class CollectiveWork;

class WorkQueue : public std::enable_shared_from_this<WorkQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<CollectiveWork>;

  // The collective runs in its turn: on the progress thread, or on a thread that waits for it.
  void post(WorkPtr work, bool is_async);
  // Runs collectives up to this one, unless another thread does, and returns when it has begun at the latest.
  void run_up_to(const CollectiveWork& work);
  // Runs all collectives that were posted, and returns when they have ended.
  void run_all(bool beside_caller = false);

 private:
  // Runs the first collective. The lock is held, before and afterwards.
  void run_first(std::unique_lock<std::mutex>& lock, bool beside_caller);

  ProgressThread progress_;
  std::mutex mutex_;  // guards the next
  std::condition_variable changed_;
  std::deque<WorkPtr> waiting_;
  bool is_running_ = false;
};

class CollectiveWork final : public HostWork {
 public:
  // `run` is called once. It hears whether the caller goes on meanwhile.
  CollectiveWork(std::shared_ptr<WorkQueue> queue, int rank, c10d::OpType type, const std::string& title,
                 const std::vector<at::Tensor>& inputs, Lists outputs, uint64_t number, std::function<void(bool)> run);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

 private:
  friend class WorkQueue;

  std::exception_ptr run(bool beside_caller);

  const std::shared_ptr<WorkQueue> queue_;
  std::function<void(bool)> run_;
  bool has_begun_ = false;  // guarded by the queue's mutex
};

}  // namespace fastsync
