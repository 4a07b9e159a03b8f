// torch.ops.fastsync.{pack,unpack,reduce} are the passes on tensors. Shapes are not checked. tests/reference.py
// specifies them.
#include <torch/library.h>

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "passes/backend.h"
#include "passes/workspace.h"

namespace fastsync {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalList = std::optional<std::vector<at::Tensor>>;

// Returns the tensor's memory. Throws unless it is contiguous and on the device, as the passes need it.
template <class T = void>
T* data_of(const at::Tensor& tensor, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.is_contiguous() && tensor.device() == device, "expected contiguous values on ", device,
                    ", got ", tensor.sizes(), " with strides ", tensor.strides(), " on ", tensor.device());
  if constexpr (std::is_void_v<T>) {
    return tensor.data_ptr();
  } else {
    return tensor.data_ptr<T>();  // throws if it has another dtype
  }
}
template <class T = void>
T* data_of(const OptionalTensor& tensor, c10::Device device) {
  return tensor ? data_of<T>(*tensor, device) : nullptr;
}

std::vector<Segment> segments_of(at::TensorList grads, DType wire, at::TensorList residuals, c10::Device device,
                                 int64_t alignment = 1) {
  for (const at::TensorList tensors : {grads, residuals}) {
    for (const at::Tensor& tensor : tensors) {
      data_of(tensor, device);
    }
  }
  return lay_out(grads, wire, residuals, alignment);
}

// Calls with the same number share a workspace, as those of a bucket do. With 0 a call has one of its own.
std::shared_ptr<Workspace> workspace_of(int64_t number, c10::Device device) {
  static std::map<std::pair<int64_t, std::string>, std::shared_ptr<Workspace>> shared;
  if (number == 0) {
    return std::make_shared<Workspace>(device);
  }
  auto& kept = shared[{number, device.str()}];
  if (!kept) {
    kept = std::make_shared<Workspace>(device);
  }
  return kept;
}

// Blocks are bytes. A tensor of uint8 stands for blocks of int8, and one of int8 for blocks of int4.
DType wire_of(const at::Tensor& wire) {
  return wire.scalar_type() == at::kChar ? DType::kInt4 : dtype_of(wire.scalar_type());
}

// Wires are rows of a matrix, or one vector.
int64_t num_rows(const at::Tensor& wires) { return wires.dim() == 2 ? wires.size(0) : 1; }
int64_t row_bytes(const at::Tensor& wires) { return static_cast<int64_t>(wires.nbytes()) / num_rows(wires); }

void pack(at::TensorList grads, const at::Tensor& wire, const at::Tensor& stats, const OptionalTensor& bucket_scale,
          const OptionalList& residuals, double multiplier, std::optional<double> limit, bool is_first,
          const OptionalTensor& weight, int64_t alignment, int64_t workspace) {
  const c10::Device device = wire.device();
  const at::TensorList kept = residuals ? at::TensorList(*residuals) : at::TensorList();
  const auto segments = segments_of(grads, wire_of(wire), kept, device, alignment);
  run_pack({.segments = segments.data(),
            .num_segments = static_cast<int64_t>(segments.size()),
            .grad_dtype = dtype_of(grads.front().scalar_type()),
            .wire_dtype = wire_of(wire),
            .wire = data_of(wire, device),
            .multiplier = multiplier,
            .limit = limit.value_or(std::numeric_limits<double>::infinity()),
            .bucket_scale = data_of<float>(bucket_scale, device),
            .stats = data_of<double>(stats, device),
            .position = {.is_first = is_first},
            .weight = data_of<double>(weight, device),
            .gap_alignment = alignment},
           device, *workspace_of(workspace, device));
}

void unpack(const at::Tensor& wires, at::TensorList grads, const at::Tensor& stats, const OptionalTensor& bucket_scale,
            double multiplier, bool is_first, bool is_last, double scale_share, int64_t workspace, bool by_tree,
            const OptionalTensor& factors) {
  const c10::Device device = wires.device();
  auto segments = segments_of(grads, wire_of(wires), {}, device);
  for (size_t i = 0; factors && i < segments.size(); ++i) {
    segments[i].operand = data_of<double>(factors, device) + i;
  }
  run_unpack({.segments = segments.data(),
              .num_segments = static_cast<int64_t>(segments.size()),
              .grad_dtype = dtype_of(grads.front().scalar_type()),
              .wire_dtype = wire_of(wires),
              .wire = data_of(wires, device),
              .bucket_scale = data_of<float>(bucket_scale, device),
              .stats = data_of<double>(stats, device),
              .num_wires = num_rows(wires),
              .stride_bytes = row_bytes(wires),
              .multiplier = multiplier,
              .position = {is_first, is_last},
              .scale_share = scale_share,
              .by_tree = by_tree},
             device, *workspace_of(workspace, device));
}

void reduce(const at::Tensor& wires, const at::Tensor& out, const OptionalTensor& bucket_scale,
            const OptionalTensor& residual, std::optional<at::ScalarType> grad_dtype, double multiplier,
            std::optional<double> limit, double residual_share, bool by_tree) {
  const c10::Device device = wires.device();
  const WireUnit unit = unit_of(wire_of(wires));
  run_reduce({.wire = data_of(wires, device),
              .num_wires = wires.size(0),
              .stride_bytes = row_bytes(wires),
              .numel = row_bytes(wires) / unit.bytes * unit.values,
              .grad_dtype = dtype_of(grad_dtype.value_or(at::kFloat)),
              .wire_dtype = wire_of(wires),
              .out = data_of(out, device),
              .out_dtype = wire_of(out),
              .multiplier = multiplier,
              .limit = limit.value_or(std::numeric_limits<double>::infinity()),
              .bucket_scale = data_of<float>(bucket_scale, device),
              .residual = data_of(residual, device),
              .residual_share = residual_share,
              .by_tree = by_tree},
             device);
}

}  // namespace

TORCH_LIBRARY(fastsync, library) {
  library.def(
      "pack(Tensor[] grads, Tensor(a!) wire, Tensor(b!) stats, Tensor? bucket_scale=None, Tensor(c!)[]? "
      "residuals=None, *, float multiplier=1.0, float? limit=None, bool is_first=True, "
      "Tensor? weight=None, int alignment=1, int workspace=0) -> ()",
      &pack);
  library.def(
      "unpack(Tensor wire, Tensor(a!)[] grads, Tensor(b!) stats, Tensor(c!)? bucket_scale=None, *, "
      "float multiplier=1.0, bool is_first=True, bool is_last=True, float scale_share=1.0, int workspace=0, bool "
      "by_tree=False, Tensor? factors=None) -> ()",
      &unpack);
  library.def(
      "reduce(Tensor wires, Tensor(a!) out, Tensor? bucket_scale=None, Tensor(b!)? residual=None, *, "
      "ScalarType? grad_dtype=None, float multiplier=1.0, float? limit=None, float residual_share=1.0, bool "
      "by_tree=False) -> ()",
      &reduce);
}

}  // namespace fastsync
