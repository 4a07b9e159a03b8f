#include "backend/work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <utility>

namespace fastsync {

void WorkQueue::post(WorkPtr work, bool is_async) {
  const CollectiveWork& posted = *work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
  }
  if (is_async) {
    progress_.post(c10::kCPU, [queue = shared_from_this()] { queue->run_all(/*beside_caller=*/true); });
  } else {
    run_up_to(posted);
  }
}

void WorkQueue::run_up_to(const CollectiveWork& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!work.has_begun_) {
    if (is_running_) {
      changed_.wait(lock);
    } else {
      run_first(lock, /*beside_caller=*/false);
    }
  }
}

void WorkQueue::run_all(bool beside_caller) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (is_running_ || !waiting_.empty()) {
    if (is_running_) {
      changed_.wait(lock);
    } else {
      run_first(lock, beside_caller);
    }
  }
}

// Who is called on completion may call the next collective and wait for it, so completion is no part of the run.
void WorkQueue::run_first(std::unique_lock<std::mutex>& lock, bool beside_caller) {
  const WorkPtr work = std::move(waiting_.front());
  waiting_.pop_front();
  work->has_begun_ = true;
  is_running_ = true;
  lock.unlock();
  const std::exception_ptr error = work->run(beside_caller);
  lock.lock();
  is_running_ = false;
  changed_.notify_all();
  lock.unlock();
  work->complete(error);
  lock.lock();
}

CollectiveWork::CollectiveWork(std::shared_ptr<WorkQueue> queue, int rank, c10d::OpType type, const std::string& title,
                               const std::vector<at::Tensor>& inputs, Lists outputs, uint64_t number,
                               std::function<void(bool)> run)
    : HostWork(rank, type, title, inputs, std::move(outputs), number), queue_(std::move(queue)), run_(std::move(run)) {}

// It lets go of the inputs when they are of no use any more. Outputs may be inference tensors, and may need gradients.
std::exception_ptr CollectiveWork::run(bool beside_caller) {
  const auto run = std::move(run_);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  try {
    run(beside_caller);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// A wait with a time limit of its own leaves the collective to the progress thread, since it must end in time.
bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) {
    queue_->run_up_to(*this);
  }
  return Work::wait(timeout);
}

HostWork::HostWork(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
                   Lists outputs, uint64_t number)
    : Work(rank, type, title.c_str(), inputs), outputs_(std::move(outputs)), number_(number) {}

void HostWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    is_settled_ = true;
    error_ = error;
    future = future_;
  }
  if (future) {
    settle(*future, error);
  }
  finish(error);
}

void HostWork::settle(c10::ivalue::Future& future, const std::exception_ptr& error) const {
  if (error) {
    future.setError(error);
  } else if (outputs_.size() > 1) {
    future.markCompleted(c10::IValue(outputs_));
  } else {
    future.markCompleted(c10::IValue(outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front()));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> HostWork::getFuture() {
  std::unique_lock<std::mutex> lock(future_mutex_);
  if (future_) {
    return future_;
  }
  const auto tensors = c10::ListType::create(c10::TensorType::get());
  future_ = outputs_.size() > 1 ? c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(tensors))
                                : c10::make_intrusive<c10::ivalue::Future>(tensors);
  if (is_settled_) {
    settle(*future_, error_);
  }
  return future_;
}

std::vector<at::Tensor> HostWork::result() {
  TORCH_CHECK(isCompleted(), "fastsync: result: the collective is under way; call wait() first");
  TORCH_CHECK(outputs_.size() <= 1, "fastsync: result: the outputs are lists of lists; take them from get_future()");
  return outputs_.empty() ? std::vector<at::Tensor>() : outputs_.front();
}

}  // namespace fastsync
