#include "backend.h"

#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#ifdef FASTSYNC_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastsync {

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

DType dtype_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kByte:
      return DType::kInt8;
    default:
      TORCH_CHECK_VALUE(false, "fastsync handles float32, float64, float16 and bfloat16 gradients, got ", dtype);
  }
}

std::vector<Segment> lay_out(at::TensorList grads, DType wire, at::TensorList residuals) {
  const int64_t alignment = wire == DType::kInt8 ? kBlockValues : 1;
  std::vector<Segment> segments;
  segments.reserve(grads.size());
  int64_t offset = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    segments.push_back(
        {grads[i].data_ptr(), grads[i].numel(), offset, residuals.empty() ? nullptr : residuals[i].data_ptr()});
    offset += (grads[i].numel() + alignment - 1) / alignment * alignment;
  }
  return segments;
}

float* data_or_null(const at::Tensor& scale) { return scale.defined() ? scale.data_ptr<float>() : nullptr; }

at::Tensor new_workspace(c10::Device device) {
  if (device.is_cpu()) {
    return {};
  }
  return at::zeros({cuda::kWorkspaceBytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return false;
}

void call_beside(c10::Device device, const std::function<void()>& call) {
  if (device.is_cpu()) {
    call();
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event given(device.type());
  given.record(guard.getStream(device));
  const c10::StreamGuard beside(guard.getStreamFromGlobalPool(device));
  given.block(guard.getStream(device));
  call();
}

namespace {

template <class Args>
using CpuPass = void (*)(const Args&);
template <class Args>
using CudaPass = void (*)(const Args&, void* workspace, void* stream);

template <class Args>
void run(const Args& args, c10::Device device, [[maybe_unused]] const at::Tensor& workspace, CpuPass<Args> on_cpu,
         [[maybe_unused]] CudaPass<Args> on_cuda) {
  if (device.is_cpu()) {
    on_cpu(args);
    return;
  }
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    on_cuda(args, workspace.defined() ? workspace.data_ptr() : nullptr,
            c10::cuda::getCurrentCUDAStream(device.index()).stream());
    return;
  }
#endif
  TORCH_CHECK_VALUE(false, "fastsync was built without support for gradients on ", device,
                    "; `fastsync doctor` says what this build can do");
}

#ifdef FASTSYNC_WITH_CUDA
constexpr CudaPass<PackArgs> kCudaPack = cuda::pack;
constexpr CudaPass<UnpackArgs> kCudaUnpack = cuda::unpack;
constexpr CudaPass<MeasureArgs> kCudaMeasure = cuda::measure;
constexpr CudaPass<ReduceArgs> kCudaReduce = [](const ReduceArgs& args, void* /*workspace*/, void* stream) {
  cuda::reduce(args, stream);
};
#else
constexpr CudaPass<PackArgs> kCudaPack = nullptr;
constexpr CudaPass<UnpackArgs> kCudaUnpack = nullptr;
constexpr CudaPass<MeasureArgs> kCudaMeasure = nullptr;
constexpr CudaPass<ReduceArgs> kCudaReduce = nullptr;
#endif

}  // namespace

void run_pack(const PackArgs& args, c10::Device device, const at::Tensor& workspace) {
  run(args, device, workspace, &cpu::pack, kCudaPack);
}

void run_unpack(const UnpackArgs& args, c10::Device device, const at::Tensor& workspace) {
  run(args, device, workspace, &cpu::unpack, kCudaUnpack);
}

void run_measure(const MeasureArgs& args, c10::Device device, const at::Tensor& workspace) {
  run(args, device, workspace, &cpu::measure, kCudaMeasure);
}

void run_reduce(const ReduceArgs& args, c10::Device device) { run(args, device, {}, &cpu::reduce, kCudaReduce); }

}  // namespace fastsync
