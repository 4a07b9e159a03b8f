#include "sums/bucket_sum.h"

#include <exception>
#include <utility>

#include "transport/progress_thread.h"

namespace fastsync {

BucketSum::BucketSum(Bucket bucket) : bucket_(std::move(bucket)) {}

// A forked child frees nothing, because threads that may still use it have stayed behind in its parent.
void BucketSum::abandon(std::unique_ptr<BucketSum> sum) {
  if (getpid() != sum->process_id_) {
    sum.release();
  } else if (sum->needs_driving() && sum->bucket_.device.is_cpu()) {
    sum->let_go_of_gradients();
    try {
      ProgressThread().post(c10::kCPU, [sum = std::shared_ptr<BucketSum>(std::move(sum))] { sum->drive(); });
    } catch (const std::exception&) {  // there is no thread: other ranks wait in vain
    }
  }
}

// Here, and not on whichever thread drops the sum: gradients may be Python's, whose last owner needs the interpreter.
void BucketSum::let_go_of_gradients() {
  bucket_.grads.clear();
  bucket_.nowhere.clear();
}

// The memory was made on backward's stream or beside it.
void BucketSum::use_memory_on_current_stream() const {
  use_on_current_stream(memory_);
  use_on_current_stream(bucket_.side_values);
}

}  // namespace fastsync
