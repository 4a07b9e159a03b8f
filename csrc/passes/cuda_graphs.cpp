#include "passes/cuda_graphs.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#ifdef FASTSYNC_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace fastsync {

namespace {

using Tensors = std::vector<at::Tensor>;

// Whether the stream is being captured. Always false if this version of torch cannot tell without CUDA's headers.
template <class Stream>
[[maybe_unused]] bool is_recording(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    return stream.is_capturing();
  }
  return false;
}

// Keeps the tensors until the process ends. It is for devices that do not tell when a graph goes away.
void hold_for_ever(Tensors tensors) {
  static std::mutex mutex;
  static auto& held = *new std::vector<Tensors>();
  const std::lock_guard<std::mutex> lock(mutex);
  held.push_back(std::move(tensors));
}

#ifdef FASTSYNC_WITH_CUDA

// Note [Memory of CUDA graphs]
//   A graph owns the tensors by a user object of CUDA. Executable graphs made of it own them as well. When the last one
//   is gone, CUDA calls a function on a thread of its own, which must not call CUDA. But destroying a tensor may. So
//   the function only puts the tensors on a list, and the next step of any engine destroys them. If no step follows,
//   they stay until the process ends.
struct Released {
  std::mutex mutex;
  std::vector<Tensors*> tensors;
  std::atomic<bool> has_some = false;  // so that a step need not take the mutex

  void add(Tensors* each) {
    const std::lock_guard<std::mutex> lock(mutex);
    tensors.push_back(each);
    has_some = true;
  }

  void destroy_all() {
    std::vector<Tensors*> all;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      std::swap(all, tensors);
      has_some = false;
    }
    for (const Tensors* each : all) {
      delete each;
    }
  }
};

Released& released() {
  static auto& released = *new Released();
  return released;
}

void release(void* tensors) { released().add(static_cast<Tensors*>(tensors)); }

// Returns null if the capture has been invalidated.
cudaGraph_t graph_under_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph));
#endif
  return status == cudaStreamCaptureStatusActive ? graph : nullptr;
}

void hold_for_cuda_graph(c10::Device device, Tensors tensors) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaGraph_t graph = graph_under_capture(c10::cuda::getCurrentCUDAStream(device.index()));
  if (graph == nullptr) {
    return;
  }
  auto owned = std::make_unique<Tensors>(std::move(tensors));
  cudaUserObject_t owner{};
  C10_CUDA_CHECK(cudaUserObjectCreate(&owner, owned.get(), &release, 1, cudaUserObjectNoDestructorSync));
  owned.release();
  const cudaError_t error = cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) {
    cudaUserObjectRelease(owner, 1);
  }
  C10_CUDA_CHECK(error);
}

#endif

}  // namespace

bool is_capturing(c10::Device device) {
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return !device.is_cpu() && is_recording(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void hold_for_graph(c10::Device device, Tensors tensors) {
  std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
  if (tensors.empty() || !is_capturing(device)) {
    return;
  }
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) {
    return hold_for_cuda_graph(device, std::move(tensors));
  }
#endif
  hold_for_ever(std::move(tensors));
}

void let_go_of_ended_graphs() {
#ifdef FASTSYNC_WITH_CUDA
  if (released().has_some.load(std::memory_order_relaxed)) {
    released().destroy_all();
  }
#endif
}

}  // namespace fastsync
