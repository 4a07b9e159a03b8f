// torch.ops.fastsync.{pack,unpack,reduce}: the passes on tensors, as tests and benchmarks call them. What would
// read or write beyond a tensor is refused.
#include <torch/library.h>

#include <optional>
#include <vector>

#include "passes/backend.h"

namespace fastsync {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalList = std::optional<std::vector<at::Tensor>>;

void check(const at::Tensor& tensor, const char* name, at::ScalarType dtype, int64_t numel, c10::Device device) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.scalar_type() == dtype && tensor.numel() == numel &&
                        tensor.is_contiguous() && tensor.device() == device,
                    name, ": expected ", numel, " contiguous elements of ", dtype, " on ", device, ", got ",
                    tensor.sizes(), " ", tensor.scalar_type(), " on ", tensor.device());
}

// The element, of T; null where there is none.
template <class T>
T* element(const OptionalTensor& tensor, const char* name, c10::Device device) {
  if (!tensor) {
    return nullptr;
  }
  check(*tensor, name, c10::CppTypeToScalarType<T>::value, 1, device);
  return tensor->data_ptr<T>();
}

double* checked_stats(const at::Tensor& stats, c10::Device device) {
  check(stats, "stats", at::kDouble, kNumStats, device);
  return stats.data_ptr<double>();
}

// Blocks travel as bytes: as uint8 those of int8, as int8 those of int4. Full: the dtype that need not be narrower than
// what is summed in.
DType wire_of(const at::Tensor& wire, const char* name, at::ScalarType full) {
  const at::ScalarType dtype = wire.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == full || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kByte || dtype == at::kChar, name,
      ": expected ", full, ", float16, bfloat16, uint8 or int8, got ", dtype);
  return dtype == at::kChar ? DType::kInt4 : dtype_of(dtype);
}

int64_t num_rows(const at::Tensor& wires) { return wires.dim() == 2 ? wires.size(0) : 1; }

// As many units as the values take, in each row.
void check_wires(const at::Tensor& wires, const char* name, DType dtype, int64_t num_values, c10::Device device) {
  const WireUnit unit = unit_of(dtype);
  const int64_t row_bytes = (num_values + unit.values - 1) / unit.values * unit.bytes;
  const auto row_numel = row_bytes / static_cast<int64_t>(wires.element_size());
  check(wires, name, wires.scalar_type(), num_rows(wires) * row_numel, device);
  TORCH_CHECK_VALUE(num_rows(wires) > 0, name, ": expected a row at least, got ", wires.sizes());
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(wires.data_ptr()) % unit.alignment == 0, name,
                    ": expected it to begin at a multiple of ", unit.alignment, " bytes");
}

int64_t row_bytes(const at::Tensor& wires) { return static_cast<int64_t>(wires.nbytes()) / num_rows(wires); }

// The gradients' dtype, which they have in common.
at::ScalarType check_grads(at::TensorList grads, c10::Device device) {
  TORCH_CHECK_VALUE(!grads.empty(), "grads: expected at least one tensor, got an empty list");
  const at::ScalarType dtype = grads.front().scalar_type();
  TORCH_CHECK_VALUE(is_supported(dtype), "grads: expected float32, float64, float16 or bfloat16, got ", dtype);
  for (const at::Tensor& grad : grads) {
    check(grad, "grads", dtype, grad.numel(), device);
  }
  return dtype;
}

void pack(at::TensorList grads, const at::Tensor& wire, const at::Tensor& stats, const OptionalTensor& bucket_scale,
          const OptionalList& residuals, double multiplier, std::optional<double> limit, bool is_first,
          const OptionalTensor& weight) {
  const c10::Device device = wire.device();
  const at::ScalarType dtype = check_grads(grads, device);
  const DType wire_dtype = wire_of(wire, "wire", dtype);
  const at::TensorList kept = residuals ? at::TensorList(*residuals) : at::TensorList();
  TORCH_CHECK_VALUE(kept.empty() || kept.size() == grads.size(), "residuals: expected ", grads.size(), ", got ",
                    kept.size());
  for (size_t i = 0; i < kept.size(); ++i) {
    check(kept[i], "residuals", compute_dtype(dtype), grads[i].numel(), device);
  }
  const auto segments = lay_out(grads, wire_dtype, kept);
  check_wires(wire, "wire", wire_dtype, wire_length(segments, unit_of(wire_dtype).values), device);
  run_pack({.segments = segments.data(),
            .num_segments = static_cast<int64_t>(segments.size()),
            .grad_dtype = dtype_of(dtype),
            .wire_dtype = wire_dtype,
            .wire = wire.data_ptr(),
            .multiplier = multiplier,
            .limit = limit.value_or(std::numeric_limits<double>::infinity()),
            .bucket_scale = element<float>(bucket_scale, "bucket_scale", device),
            .stats = checked_stats(stats, device),
            .turn = {.is_first = is_first},
            .weight = element<double>(weight, "weight", device)},
           device, new_workspace(device));
}

void unpack(const at::Tensor& wires, at::TensorList grads, const at::Tensor& stats, const OptionalTensor& bucket_scale,
            double multiplier, bool is_first, bool is_last, double scale_share) {
  const c10::Device device = wires.device();
  const at::ScalarType dtype = check_grads(grads, device);
  const DType wire_dtype = wire_of(wires, "wire", dtype);
  const auto segments = lay_out(grads, wire_dtype);
  check_wires(wires, "wire", wire_dtype, wire_length(segments, unit_of(wire_dtype).values), device);
  run_unpack({.segments = segments.data(),
              .num_segments = static_cast<int64_t>(segments.size()),
              .grad_dtype = dtype_of(dtype),
              .wire_dtype = wire_dtype,
              .wire = wires.data_ptr(),
              .bucket_scale = element<float>(bucket_scale, "bucket_scale", device),
              .stats = checked_stats(stats, device),
              .num_wires = num_rows(wires),
              .stride_bytes = row_bytes(wires),
              .multiplier = multiplier,
              .turn = {is_first, is_last},
              .scale_share = scale_share},
             device, new_workspace(device));
}

void reduce(const at::Tensor& wires, const at::Tensor& out, const OptionalTensor& bucket_scale,
            const OptionalTensor& residual, std::optional<at::ScalarType> grad_dtype, double multiplier,
            std::optional<double> limit, double residual_share) {
  const c10::Device device = wires.device();
  const at::ScalarType full = compute_dtype(grad_dtype.value_or(at::kFloat));
  const DType from = wire_of(wires, "wires", full);
  const DType to = wire_of(out, "out", full);
  const WireUnit unit = unit_of(from);
  TORCH_CHECK_VALUE(from == to || unit.values == 1, "out: expected ", wires.scalar_type(), " like the wires, got ",
                    out.scalar_type());
  TORCH_CHECK_VALUE(wires.dim() == 2 && wires.size(0) > 0, "wires: expected a matrix, got ", wires.sizes());
  const int64_t numel = row_bytes(wires) / unit.bytes * unit.values;
  check_wires(wires, "wires", from, numel, device);
  TORCH_CHECK_VALUE(numel % unit_of(to).values == 0, "out: expected whole blocks, got ", numel, " values");
  check_wires(out, "out", to, numel, device);
  if (residual) {
    check(*residual, "residual", full, numel, device);
  }
  run_reduce({.wire = wires.data_ptr(),
              .num_wires = wires.size(0),
              .stride_bytes = row_bytes(wires),
              .numel = numel,
              .grad_dtype = dtype_of(grad_dtype.value_or(at::kFloat)),
              .wire_dtype = from,
              .out = out.data_ptr(),
              .out_dtype = to,
              .multiplier = multiplier,
              .limit = limit.value_or(std::numeric_limits<double>::infinity()),
              .bucket_scale = element<float>(bucket_scale, "bucket_scale", device),
              .residual = residual ? residual->data_ptr() : nullptr,
              .residual_share = residual_share},
             device);
}

}  // namespace

TORCH_LIBRARY(fastsync, library) {
  library.def(
      "pack(Tensor[] grads, Tensor(a!) wire, Tensor(b!) stats, Tensor? bucket_scale=None, Tensor(c!)[]? "
      "residuals=None, *, float multiplier=1.0, float? limit=None, bool is_first=True, "
      "Tensor? weight=None) -> ()",
      &pack);
  library.def(
      "unpack(Tensor wire, Tensor(a!)[] grads, Tensor(b!) stats, Tensor(c!)? bucket_scale=None, *, "
      "float multiplier=1.0, bool is_first=True, bool is_last=True, float scale_share=1.0) -> ()",
      &unpack);
  library.def(
      "reduce(Tensor wires, Tensor(a!) out, Tensor? bucket_scale=None, Tensor(b!)? residual=None, *, "
      "ScalarType? grad_dtype=None, float multiplier=1.0, float? limit=None, float residual_share=1.0) -> ()",
      &reduce);
}

}  // namespace fastsync
