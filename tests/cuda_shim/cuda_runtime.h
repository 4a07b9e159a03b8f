// As much of the CUDA runtime as csrc/passes/cuda uses, on the host: a kernel is a function, its threads are fibers on
// one thread of the host, and its blocks run one after the other. For arithmetic, indexing and barriers; fences, memory
// models and speed are not emulated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <source_location>
#include <type_traits>
#include <utility>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__ &  // one for all threads
#define __shared__ static    // of one block at a time, and left as the last one wrote it

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchFailure };
using cudaStream_t = struct CUstream_st*;

namespace emulator {

constexpr size_t kMaxArgumentBytes = 32764;
constexpr unsigned kMaxThreads = 1024;

// Runs the call once for each thread of each block. Reports what CUDA leaves undefined, such as a barrier that some
// threads never reach.
cudaError_t launch(dim3 grid, dim3 block, size_t argument_bytes, const std::function<void()>& call);

// True: the last thread and the last block go first.
void set_descending(bool is_descending);

void wait_for_block(std::source_location where);
unsigned max_over_warp(unsigned mask, unsigned value, std::source_location where);
unsigned from_lane_above(unsigned mask, unsigned value, unsigned distance, std::source_location where);

}  // namespace emulator

using std::source_location;

inline void __syncthreads(source_location where = source_location::current()) { emulator::wait_for_block(where); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, source_location where = source_location::current()) {
  return emulator::max_over_warp(mask, value, where);
}
inline unsigned __shfl_down_sync(unsigned mask, unsigned value, unsigned distance,
                                 source_location where = source_location::current()) {
  return emulator::from_lane_above(mask, value, distance, where);
}
inline void __threadfence() {}
template <class T>
T atomicAdd(T* address, T value) {
  return std::exchange(*address, *address + value);
}

// A nan gives way to a number, as on the device.
template <class T>
T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmax(a, b);
  } else {
    return std::max(a, b);
  }
}
template <class T>
T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::fmin(a, b);
  } else {
    return std::min(a, b);
  }
}

template <class... Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args...), dim3 grid, dim3 block, void** arguments, size_t /*shared_bytes*/,
                             cudaStream_t /*stream*/) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return emulator::launch(grid, block, (sizeof(Args) + ... + 0),
                            [&] { kernel(*static_cast<std::remove_reference_t<Args>*>(arguments[i])...); });
  }(std::index_sequence_for<Args...>());
}
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
