// For threads that work beside backward's.
#pragma once

#include <ATen/Parallel.h>

namespace fastsync {

// While one lives, its thread does by itself what torch and the passes would share out over threads: each thread that
// asks gets an OpenMP team of its own, and a second one would fight with backward's for the cores.
class SingleThreaded {
 public:
  // Before a thread's first parallel region torch sets its number of threads, unless it has: libtorch's code by a flag
  // of its own, and the code inlined here by another.
  SingleThreaded() {
    at::internal::lazy_init_num_threads();
    num_threads_ = at::get_num_threads();
    omp_set_num_threads(1);
  }
  ~SingleThreaded() { omp_set_num_threads(num_threads_); }
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int num_threads_;
};

}  // namespace fastsync
