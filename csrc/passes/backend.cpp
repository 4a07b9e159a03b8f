#include "passes/backend.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "passes/aten/passes.h"
#include "passes/workspace.h"

#ifdef FASTSYNC_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastsync {

namespace {

// Our dtypes and torch's, in the order of DType. Blocks travel as bytes.
constexpr std::pair<DType, at::ScalarType> kDTypes[] = {
    {DType::kFloat32, at::kFloat},     {DType::kFloat64, at::kDouble}, {DType::kFloat16, at::kHalf},
    {DType::kBFloat16, at::kBFloat16}, {DType::kInt8, at::kByte},      {DType::kInt4, at::kByte}};

}  // namespace

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

DType dtype_of(at::ScalarType dtype) {
  for (const auto& [own, torchs] : kDTypes) {
    if (torchs == dtype) {
      return own;
    }
  }
  TORCH_CHECK_VALUE(false, "fastsync handles float32, float64, float16 and bfloat16 gradients, got ", dtype);
}

at::ScalarType scalar_type_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].second; }

at::ScalarType compute_dtype(at::ScalarType grad) { return grad == at::kDouble ? at::kDouble : at::kFloat; }

namespace {

constexpr int64_t kWireAlignment = 8;

int64_t end_of(const Segment& segment, int64_t alignment) {
  return (segment.offset + segment.numel + alignment - 1) / alignment * alignment;
}

}  // namespace

int64_t alignment_of(DType wire, size_t num_gradients) {
  return std::max(unit_of(wire).values, num_gradients > 1 ? kWireAlignment : 1);
}

int64_t wire_length(const std::vector<Segment>& segments, int64_t alignment) {
  return end_of(segments.back(), alignment);
}

std::vector<Segment> lay_out(at::TensorList grads, DType wire, at::TensorList residuals, int64_t alignment) {
  alignment = std::max(unit_of(wire).values, alignment);
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

// On a CPU it calls memcpy, because copy_ takes longer than packing the gradients of a small policy.
void put_values(const at::Tensor& values, const at::Tensor& buffer, int64_t offset, int64_t stride, int64_t count) {
  if (!buffer.is_cpu()) {
    const at::Tensor bytes = values.view(at::kByte);
    buffer.as_strided({count, bytes.numel()}, {stride, 1}, offset).copy_(bytes);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<std::byte*>(buffer.data_ptr()) + offset + i * stride, values.const_data_ptr(),
                values.nbytes());
  }
}

namespace {

template <class T>
at::Tensor values_on(const std::vector<T>& values, c10::Device device) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  const at::Tensor on_host = at::empty({static_cast<int64_t>(values.size())}, options.pinned_memory(!device.is_cpu()));
  std::copy(values.begin(), values.end(), on_host.data_ptr<T>());
  return on_host.to(device, /*non_blocking=*/true);
}

}  // namespace

at::Tensor to_device(const std::vector<float>& values, c10::Device device) { return values_on(values, device); }
at::Tensor to_device(const std::vector<double>& values, c10::Device device) { return values_on(values, device); }

const double* readable(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor.const_data_ptr<double>() : nullptr; }

namespace {

// The passes of each device type. Their stream is null except on CUDA.
std::array<std::optional<Passes>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& all_passes() {
  static std::array<std::optional<Passes>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all = [] {
    decltype(all) built;
    built[static_cast<size_t>(c10::kCPU)] = cpu::passes();
#ifdef FASTSYNC_WITH_CUDA
    built[static_cast<size_t>(c10::kCUDA)] = {&cuda::pack, &cuda::unpack, &cuda::reduce, &cuda::tile_size,
                                              &cuda::upload};
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

bool is_aten(const std::string& name) {
  TORCH_CHECK_VALUE(name.empty() || name == "auto" || name == "aten", "FASTSYNC_KERNELS: expected auto, which takes ",
                    "fused kernels where they were built, or aten, which takes torch's own operations everywhere; got ",
                    name);
  return name == "aten";
}

std::atomic<bool>& takes_aten_everywhere() {
  static std::atomic<bool> takes_aten = [] {
    const char* const name = std::getenv("FASTSYNC_KERNELS");
    return is_aten(name != nullptr ? name : "");
  }();
  return takes_aten;
}

// Returns the device's own passes, or null if those by PyTorch's operators run. On devices only these add up by a tree.
const Passes* passes_on(c10::Device device, bool by_tree = false) {
  const bool takes_aten = takes_aten_everywhere() || (by_tree && !device.is_cpu());
  return takes_aten ? nullptr : fused_passes(device.type());
}

template <class Args>
Scratch scratch_for(const Args& args, const Passes& passes, Workspace& workspace, void* stream) {
  const c10::ArrayRef<Segment> segments(args.segments, static_cast<size_t>(args.num_segments));
  const bool have_factors = std::is_same_v<Args, UnpackArgs> && !segments.empty() && segments[0].factor() != nullptr;
  return workspace.prepare(passes, segments, args.grad_dtype, args.wire_dtype, have_factors, stream);
}

}  // namespace

void register_passes(c10::DeviceType type, const Passes& passes) { all_passes()[static_cast<size_t>(type)] = passes; }

const Passes* fused_passes(c10::DeviceType type) {
  const auto& passes = all_passes()[static_cast<size_t>(type)];
  return passes.has_value() ? &*passes : nullptr;
}

std::string kernels_on(c10::DeviceType type) {
  return takes_aten_everywhere() || fused_passes(type) == nullptr ? "generic" : "fused";
}

bool takes_own_wire(c10::Device device) { return device.is_cpu() && !takes_aten_everywhere(); }

void use_kernels(const std::string& name) { takes_aten_everywhere() = is_aten(name); }

void run_pack(const PackArgs& args, c10::Device device, Workspace& workspace) {
  const c10::DeviceGuard guard(device);
  if (const Passes* const passes = passes_on(device)) {
    void* const stream = current_stream(device);
    passes->pack(args, scratch_for(args, *passes, workspace, stream), stream);
  } else {
    aten::pack(args, device);
  }
}

void run_unpack(const UnpackArgs& args, c10::Device device, Workspace& workspace) {
  const c10::DeviceGuard guard(device);
  if (const Passes* const passes = passes_on(device, args.by_tree)) {
    void* const stream = current_stream(device);
    passes->unpack(args, scratch_for(args, *passes, workspace, stream), stream);
  } else {
    aten::unpack(args, device);
  }
}

void run_reduce(const ReduceArgs& args, c10::Device device) {
  const c10::DeviceGuard guard(device);
  if (const Passes* const passes = passes_on(device, args.by_tree)) {
    passes->reduce(args, Scratch(), current_stream(device));
  } else {
    aten::reduce(args, device);
  }
}

}  // namespace fastsync
