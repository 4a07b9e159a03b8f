#include "sums/sum_work.h"

#include <exception>
#include <utility>

#include "transport/progress_thread.h"
#include "transport/streams.h"

namespace fastsync {

SumWork::SumWork(FlatGradients gradients) : gradients_(std::move(gradients)) {}

// A forked child destroys no sum, because the threads that may still use it have stayed behind in its parent.
void SumWork::abandon(std::unique_ptr<SumWork> sum) {
  if (!sum->is_of_this_process()) {
    sum.release();
  } else if (sum->needs_driving() && sum->gradients_.device.is_cpu()) {
    sum->let_go_of_gradients();
    try {
      ProgressThread().post(c10::kCPU, [sum = std::shared_ptr<SumWork>(std::move(sum))] { sum->drive(); });
    } catch (const std::exception&) {  // there is no thread: other ranks wait in vain
    }
  }
}

// receive and abandon call this, because another thread may destroy the sum. The last owner of a Python gradient needs
// the interpreter.
void SumWork::let_go_of_gradients() {
  gradients_.grads.clear();
  gradients_.nowhere.clear();
}

// The memory was made on backward's stream or on the engine's own.
void SumWork::use_memory_on_current_stream() const {
  use_on_current_stream(memory_);
  use_on_current_stream(gradients_.side_values);
}

}  // namespace fastsync
