#include "backend.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

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

namespace {

constexpr int64_t kWireAlignment = 8;

int64_t end_of(const Segment& segment, int64_t alignment) {
  return segment.offset + segment.numel + gap_behind(segment, alignment);
}

}  // namespace

int64_t alignment_of(DType wire, size_t num_gradients) {
  return wire == DType::kInt8 ? kBlockValues : (num_gradients > 1 ? kWireAlignment : 1);
}

int64_t wire_length(const std::vector<Segment>& segments, int64_t alignment) {
  return end_of(segments.back(), alignment);
}

std::vector<Segment> lay_out(at::TensorList grads, DType wire, at::TensorList residuals, int64_t alignment) {
  alignment = wire == DType::kInt8 ? kBlockValues : alignment;
  std::vector<Segment> segments;
  segments.reserve(grads.size());
  int64_t offset = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    segments.push_back(
        {grads[i].data_ptr(), grads[i].numel(), offset, residuals.empty() ? nullptr : residuals[i].data_ptr()});
    offset = end_of(segments.back(), alignment);
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

namespace {

// The engine's own, the same every time: another one of the pool might be the user's, or the process group's.
c10::Stream side_stream(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> streams;
  const std::pair key(device.type(), device.index());
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = streams.find(key);
  if (found != streams.end()) {
    return found->second;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  return streams.emplace(key, guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)).first->second;
}

}  // namespace

void call_beside(c10::Device device, const std::function<void()>& call) {
  if (device.is_cpu()) {
    call();
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event given(device.type());
  given.record(guard.getStream(device));
  const c10::StreamGuard beside(side_stream(device));
  given.block(beside.current_stream());
  call();
}

namespace {

// By device type. A pass gets null for the stream of a device that has none.
std::array<std::optional<Passes>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& all_passes() {
  static std::array<std::optional<Passes>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all = [] {
    decltype(all) built;
    built[static_cast<size_t>(c10::kCPU)] = {[](const PackArgs& args, void*, void*) { cpu::pack(args); },
                                             [](const UnpackArgs& args, void*, void*) { cpu::unpack(args); },
                                             [](const MeasureArgs& args, void*, void*) { cpu::measure(args); },
                                             [](const ReduceArgs& args, void*) { cpu::reduce(args); }};
#ifdef FASTSYNC_WITH_CUDA
    built[static_cast<size_t>(c10::kCUDA)] = {&cuda::pack, &cuda::unpack, &cuda::measure, &cuda::reduce};
#endif
    return built;
  }();
  return all;
}

void* current_stream([[maybe_unused]] c10::Device device) {
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) {
    return c10::cuda::getCurrentCUDAStream(device.index()).stream();
  }
#endif
  return nullptr;
}

void* data_or_none(const at::Tensor& workspace) { return workspace.defined() ? workspace.data_ptr() : nullptr; }

}  // namespace

void register_passes(c10::DeviceType type, const Passes& passes) { all_passes()[static_cast<size_t>(type)] = passes; }

const Passes& passes_of(c10::Device device) {
  const auto& passes = all_passes()[static_cast<size_t>(device.type())];
  TORCH_CHECK_VALUE(passes.has_value(), "fastsync was built without support for gradients on ", device,
                    "; `fastsync doctor` says what this build can do");
  return *passes;
}

void run_pack(const PackArgs& args, c10::Device device, const at::Tensor& workspace) {
  const c10::DeviceGuard guard(device);
  passes_of(device).pack(args, data_or_none(workspace), current_stream(device));
}

void run_unpack(const UnpackArgs& args, c10::Device device, const at::Tensor& workspace) {
  const c10::DeviceGuard guard(device);
  passes_of(device).unpack(args, data_or_none(workspace), current_stream(device));
}

void run_measure(const MeasureArgs& args, c10::Device device, const at::Tensor& workspace) {
  const c10::DeviceGuard guard(device);
  passes_of(device).measure(args, data_or_none(workspace), current_stream(device));
}

void run_reduce(const ReduceArgs& args, c10::Device device) {
  const c10::DeviceGuard guard(device);
  passes_of(device).reduce(args, current_stream(device));
}

}  // namespace fastsync
