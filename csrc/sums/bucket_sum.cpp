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
