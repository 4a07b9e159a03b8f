#include "sums/bucket_sum.h"

namespace fastsync {

void BucketSum::drive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!needs_driving() || std::exchange(is_driven_, true)) {
    return;
  }
  try {
    use_memory();
    drive_all();
    driven_.set(bucket_.device);
  } catch (...) {
    error_ = std::current_exception();
    give_up();
  }
}

// Gradients end here, for they may be Python's, and a thread that lets go of those needs the interpreter. A forked
// child lets go of nothing: the threads stayed behind that something may be under way on.
void BucketSum::abandon(std::unique_ptr<BucketSum> sum) {
  if (getpid() != sum->process_id_) {
    sum.release();
  } else if (sum->needs_driving() && !sum->is_driven_ && sum->bucket_.device.is_cpu()) {
    for (auto* tensors : {&sum->bucket_.grads, &sum->bucket_.nowhere}) {
      tensors->clear();
    }
    try {
      ProgressThread().post(c10::kCPU, [sum = std::shared_ptr<BucketSum>(std::move(sum))] { sum->drive(); });
    } catch (const std::exception&) {  // there is no thread: other ranks wait in vain
    }
  }
}

void BucketSum::finish(const std::function<void()>& on_reduced) {
  drive();
  if (error_) {
    std::rethrow_exception(error_);
  }
  driven_.wait();  // no message says so where a rank has nobody to send to
  receive(on_reduced);
  use_memory();
}

}  // namespace fastsync
