// torch.ops.fastsync.*: the passes as operators. Schemas declare what is written; arguments are checked before anything
// is touched. On the Meta device an operator is its checks alone, for it returns nothing.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "passes/backend.h"

namespace fastsync {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalList = std::optional<std::vector<at::Tensor>>;

// ---- wires as tensors -----------------------------------------------------------------------------------------------

// A wire's tensor has its values for elements, or the bytes of its blocks.
int64_t elements_of(const WireUnit& unit) { return unit.values > 1 ? unit.bytes : 1; }

WireUnit unit_of(const at::Tensor& wire) { return unit_of(dtype_of(wire.scalar_type())); }

c10::SymInt num_values(const c10::SymInt& elements, const WireUnit& unit) {
  return elements / elements_of(unit) * unit.values;
}

c10::SymInt wire_numel(at::TensorList grads, const WireUnit& unit, int64_t alignment) {
  const int64_t step = std::max(unit.values, alignment);
  c10::SymInt numel = 0;
  for (const at::Tensor& grad : grads) {
    numel += (grad.sym_numel() + (step - 1)) / step * (step / unit.values * elements_of(unit));
  }
  return numel;
}

// One wire is a vector, several are the rows of a matrix.
int64_t num_rows(const at::Tensor& wires) { return wires.dim() == 2 ? wires.size(0) : 1; }
int64_t row_bytes(const at::Tensor& wires) {
  return wires.dim() == 2 ? wires.stride(0) * static_cast<int64_t>(wires.element_size()) : 0;
}

bool is_wire(at::ScalarType dtype, at::ScalarType full) {
  return dtype == full || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kByte;
}

// ---- checks ---------------------------------------------------------------------------------------------------------

void check_grads(at::TensorList grads) {
  TORCH_CHECK_VALUE(!grads.empty(), "grads: expected at least one tensor, got an empty list");
  const at::Tensor& first = grads.front();
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& grad = grads[i];
    TORCH_CHECK_VALUE(grad.layout() == at::kStrided, "grads[", i, "]: expected a dense tensor, got layout ",
                      grad.layout(), "; fastsync does not handle sparse gradients");
    TORCH_CHECK_VALUE(is_supported(grad.scalar_type()), "grads[", i,
                      "]: expected float32, float64, float16 or bfloat16, got ", grad.scalar_type());
    TORCH_CHECK_VALUE(grad.scalar_type() == first.scalar_type(), "grads[", i, "]: expected ", first.scalar_type(),
                      " like grads[0], got ", grad.scalar_type());
    TORCH_CHECK_VALUE(grad.device() == first.device(), "grads[", i, "]: expected device ", first.device(),
                      " like grads[0], got ", grad.device());
  }
}

void check_dense(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, ": expected a dense tensor, got layout ", tensor.layout());
}

void check_device(const at::Tensor& tensor, const char* name, const at::Tensor& like, const char* others) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, ": expected device ", like.device(), " like the ", others,
                    ", got ", tensor.device());
}

void check_stats(const at::Tensor& stats, const at::Tensor& grad) {
  TORCH_CHECK_VALUE(stats.scalar_type() == at::kDouble && stats.sym_numel() == kNumStats && stats.is_contiguous() &&
                        stats.device() == grad.device(),
                    "stats: expected ", static_cast<int>(kNumStats), " contiguous float64 elements on ", grad.device(),
                    ", got ", stats.sym_sizes(), " ", stats.scalar_type(), " on ", stats.device());
}

void check_element(const OptionalTensor& tensor, const char* name, at::ScalarType dtype, const char* dtype_name,
                   c10::Device device) {
  TORCH_CHECK_VALUE(!tensor.has_value() || (tensor->scalar_type() == dtype && tensor->sym_numel() == 1 &&
                                            tensor->layout() == at::kStrided && tensor->device() == device),
                    name, ": expected one ", dtype_name, " element on ", device, ", got ", tensor->sym_sizes(), " ",
                    tensor->scalar_type(), " on ", tensor->device());
}

void check_residual(const at::Tensor& residual, const c10::SymInt& numel, at::ScalarType dtype, c10::Device device,
                    const std::string& name) {
  TORCH_CHECK_VALUE(residual.layout() == at::kStrided && residual.scalar_type() == dtype &&
                        residual.device() == device && residual.sym_numel() == numel && residual.is_contiguous(),
                    name, ": expected a contiguous ", dtype, " tensor of ", numel, " elements on ", device, ", got ",
                    residual.sym_sizes(), " ", residual.scalar_type(), " on ", residual.device());
}

void check_residuals(at::TensorList residuals, at::TensorList grads) {
  TORCH_CHECK_VALUE(residuals.empty() || residuals.size() == grads.size(),
                    "residuals: expected none or as many as there are gradients (", grads.size(), "), got ",
                    residuals.size());
  for (size_t i = 0; i < residuals.size(); ++i) {
    check_residual(residuals[i], grads[i].sym_numel(), compute_dtype(grads[i].scalar_type()), grads[i].device(),
                   "residuals[" + std::to_string(i) + "]");
  }
}

bool has_contiguous_rows(const at::Tensor& matrix) { return matrix.sym_stride(1) == 1 || matrix.sym_size(1) <= 1; }

void check_wire(const at::Tensor& wire, at::TensorList grads, bool is_matrix = false, int64_t alignment = 1) {
  const auto full = grads.front().scalar_type();
  check_dense(wire, "wire");
  TORCH_CHECK_VALUE(is_wire(wire.scalar_type(), full), "wire: expected the gradients' dtype (", full,
                    "), float16, bfloat16 or uint8 (blocks of int8), got ", wire.scalar_type());
  check_device(wire, "wire", grads.front(), "gradients");
  const WireUnit unit = unit_of(wire);
  const c10::SymInt numel = wire_numel(grads, unit, alignment);
  const std::string reason = unit.values > 1 ? c10::str(", ", unit.bytes, " for each block of ", unit.values,
                                                        " values, of which every gradient begins one")
                             : alignment > 1
                                 ? ", as many as the gradients have, each of them from a multiple of the alignment on"
                                 : ", as many as the gradients have";
  if (is_matrix) {
    TORCH_CHECK_VALUE(wire.sym_size(0) > 0 && wire.sym_size(1) == numel && has_contiguous_rows(wire),
                      "wire: expected a matrix of contiguous rows of ", numel, " elements each", reason, ", got ",
                      wire.sym_sizes(), " with strides ", wire.sym_strides());
  } else {
    TORCH_CHECK_VALUE(wire.dim() == 1 && wire.is_contiguous() && wire.sym_numel() == numel,
                      "wire: expected a contiguous vector of ", numel, " elements", reason, ", got ", wire.sym_sizes());
  }
}

// A block's scale is read and written as the float that it is.
void check_alignment(const at::Tensor& wire, const char* name) {
  const int64_t alignment = unit_of(wire).alignment;
  TORCH_CHECK_VALUE(wire.numel() == 0 || (reinterpret_cast<uintptr_t>(wire.data_ptr()) % alignment == 0 &&
                                          (num_rows(wire) == 1 || row_bytes(wire) % alignment == 0)),
                    name, ": expected blocks of int8 to begin at multiples of ", alignment,
                    " bytes, got storage offset ", wire.storage_offset(), " and strides ", wire.strides());
}

void check_writable(at::TensorList grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(grads[i]) != at::MemOverlap::Yes, "grads[", i,
                      "]: expected a tensor to ", "write to, got one whose elements share memory (shape ",
                      grads[i].sizes(), ", strides ", grads[i].strides(), "); clone it first");
  }
}

void check_multiplier(double multiplier) {
  TORCH_CHECK_VALUE(std::isfinite(multiplier), "multiplier: expected a finite number, got ", multiplier);
}

// How values become those of a wire.
void check_encoding(const at::Tensor& wire, std::optional<double> limit, bool stochastic) {
  TORCH_CHECK_VALUE(!limit.has_value() || *limit > 0, "limit: expected a positive number or None, got ", *limit);
  TORCH_CHECK_VALUE(!stochastic || unit_of(wire).values > 1, "stochastic: expected False, got True for a wire of ",
                    wire.scalar_type(), "; only uint8 (blocks of int8) is rounded so");
}

// ---- arguments ------------------------------------------------------------------------------------------------------

double limit_or_none(std::optional<double> limit) { return limit.value_or(std::numeric_limits<double>::infinity()); }

template <class T>
T* data_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->data_ptr<T>() : nullptr;
}

at::TensorList list_of(const OptionalList& tensors) {
  return tensors.has_value() ? at::TensorList(*tensors) : at::TensorList();
}

std::vector<at::Tensor> as_contiguous(at::TensorList grads) {
  std::vector<at::Tensor> dense;
  dense.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    dense.push_back(grad.contiguous());
  }
  return dense;
}

// Tells autograd that a tensor it may have saved is another one now.
void mark_written(const OptionalTensor& tensor) {
  if (tensor.has_value()) {
    tensor->unsafeGetTensorImpl()->bump_version();
  }
}

// ---- operators; those that do not run check their arguments ---------------------------------------------------------

template <bool runs>
void pack(at::TensorList grads, at::Tensor wire, at::Tensor stats, const OptionalTensor& bucket_scale,
          const OptionalList& residuals, double multiplier, std::optional<double> limit, bool stochastic, int64_t seed,
          bool is_first, int64_t alignment, const OptionalTensor& step, const OptionalTensor& weight) {
  check_grads(grads);
  TORCH_CHECK_VALUE(alignment >= 1 && alignment <= kBlockValues, "alignment: expected 1 to ", kBlockValues,
                    " elements, got ", alignment);
  check_wire(wire, grads, /*is_matrix=*/false, alignment);
  check_stats(stats, grads.front());
  check_element(bucket_scale, "bucket_scale", at::kFloat, "float32", wire.device());
  check_residuals(list_of(residuals), grads);
  check_multiplier(multiplier);
  check_encoding(wire, limit, stochastic);
  check_element(step, "step", at::kLong, "int64", wire.device());
  check_element(weight, "weight", at::kDouble, "float64", wire.device());
  if constexpr (runs) {
    check_alignment(wire, "wire");
    const auto dense = as_contiguous(grads);
    const auto segments = lay_out(dense, dtype_of(wire.scalar_type()), list_of(residuals), alignment);
    const PackArgs args{.segments = segments.data(),
                        .num_segments = static_cast<int64_t>(segments.size()),
                        .grad_dtype = dtype_of(dense.front().scalar_type()),
                        .wire_dtype = dtype_of(wire.scalar_type()),
                        .wire = wire.data_ptr(),
                        .multiplier = multiplier,
                        .limit = limit_or_none(limit),
                        .bucket_scale = data_or_null<float>(bucket_scale),
                        .stats = stats.data_ptr<double>(),
                        .rounding = {stochastic, static_cast<uint64_t>(seed), data_or_null<int64_t>(step)},
                        .turn = {.is_first = is_first},
                        .alignment = alignment,
                        .weight = data_or_null<double>(weight)};
    run_pack(args, wire.device(), new_workspace(wire.device()));
    mark_written(wire);
    mark_written(stats);
    for (const at::Tensor& residual : list_of(residuals)) {
      mark_written(residual);
    }
  }
}

template <bool runs>
void unpack(const at::Tensor& wire, at::TensorList grads, at::Tensor stats, OptionalTensor bucket_scale,
            double multiplier, bool is_first, bool is_last, OptionalTensor step, double scale_share) {
  check_grads(grads);
  check_wire(wire, grads, wire.dim() == 2);
  check_stats(stats, grads.front());
  check_element(bucket_scale, "bucket_scale", at::kFloat, "float32", wire.device());
  check_multiplier(multiplier);
  check_element(step, "step", at::kLong, "int64", wire.device());
  TORCH_CHECK_VALUE(scale_share > 0 && std::isfinite(scale_share),
                    "scale_share: expected a finite number above 0, got ", scale_share);
  if constexpr (runs) {
    check_alignment(wire, "wire");
    check_writable(grads);
    std::vector<at::Tensor> dense;
    for (const at::Tensor& grad : grads) {
      dense.push_back(grad.is_contiguous() ? grad : at::empty(grad.sizes(), grad.options()));
    }
    const auto segments = lay_out(dense, dtype_of(wire.scalar_type()));
    const UnpackArgs args{.segments = segments.data(),
                          .num_segments = static_cast<int64_t>(segments.size()),
                          .grad_dtype = dtype_of(dense.front().scalar_type()),
                          .wire_dtype = dtype_of(wire.scalar_type()),
                          .wire = wire.data_ptr(),
                          .bucket_scale = data_or_null<float>(bucket_scale),
                          .stats = stats.data_ptr<double>(),
                          .num_wires = num_rows(wire),
                          .stride_bytes = row_bytes(wire),
                          .multiplier = multiplier,
                          .turn = {is_first, is_last},
                          .step = data_or_null<int64_t>(step),
                          .scale_share = scale_share};
    run_unpack(args, wire.device(), new_workspace(wire.device()));
    for (size_t i = 0; i < grads.size(); ++i) {
      if (dense[i].is_same(grads[i])) {
        mark_written(grads[i]);
      } else {
        grads[i].copy_(dense[i]);
      }
    }
    mark_written(stats);
    if (is_last) {
      mark_written(bucket_scale);
      mark_written(step);
    }
  }
}

template <bool runs>
void reduce(const at::Tensor& wires, at::Tensor out, const OptionalTensor& bucket_scale, OptionalTensor residual,
            std::optional<at::ScalarType> grad_dtype, double multiplier, std::optional<double> limit, bool stochastic,
            int64_t seed, const OptionalTensor& step) {
  const auto grad = grad_dtype.value_or(at::kFloat);
  TORCH_CHECK_VALUE(is_supported(grad), "grad_dtype: expected float32, float64, float16 or bfloat16, got ", grad);
  check_dense(wires, "wires");
  check_dense(out, "out");
  const auto full = compute_dtype(grad);
  const auto from = wires.scalar_type();
  const auto to = out.scalar_type();
  TORCH_CHECK_VALUE(is_wire(from, full), "wires: expected ", full,
                    ", which the sums are taken in, float16, bfloat16 or uint8 (blocks of int8), got ", from);
  TORCH_CHECK_VALUE(wires.dim() == 2 && wires.sym_size(0) > 0 && has_contiguous_rows(wires),
                    "wires: expected a matrix of contiguous rows, got ", wires.sym_sizes(), " with strides ",
                    wires.sym_strides());
  TORCH_CHECK_VALUE(wires.sym_size(1) % elements_of(unit_of(wires)) == 0, "wires: expected rows of whole blocks of ",
                    elements_of(unit_of(wires)), " bytes, got ", wires.sym_sizes());
  TORCH_CHECK_VALUE(to == from || to == full || (from == full && is_wire(to, full)), "out: expected ", from,
                    " like the wires, or ", full, ", which the sums are taken in, got ", to);
  check_device(out, "out", wires, "wires");
  const c10::SymInt numel = num_values(wires.sym_size(1), unit_of(wires));
  const WireUnit unit = unit_of(out);
  TORCH_CHECK_VALUE(out.dim() == 1 && out.is_contiguous() && num_values(out.sym_numel(), unit) == numel &&
                        out.sym_numel() % elements_of(unit) == 0,
                    "out: expected a contiguous vector for ", numel, " values",
                    unit.values > 1 ? c10::str(", ", unit.bytes, " bytes for each ", unit.values, " of them") : "",
                    ", got ", out.sym_sizes());
  check_element(bucket_scale, "bucket_scale", at::kFloat, "float32", wires.device());
  if (residual.has_value()) {
    check_residual(*residual, numel, full, wires.device(), "residual");
  }
  check_multiplier(multiplier);
  check_encoding(out, limit, stochastic);
  check_element(step, "step", at::kLong, "int64", wires.device());
  if constexpr (runs) {
    check_alignment(wires, "wires");
    check_alignment(out, "out");
    const ReduceArgs args{.wire = wires.data_ptr(),
                          .num_wires = wires.size(0),
                          .stride_bytes = row_bytes(wires),
                          .numel = numel.expect_int(),
                          .grad_dtype = dtype_of(grad),
                          .wire_dtype = dtype_of(from),
                          .out = out.data_ptr(),
                          .out_dtype = dtype_of(to),
                          .multiplier = multiplier,
                          .limit = limit_or_none(limit),
                          .bucket_scale = data_or_null<float>(bucket_scale),
                          .residual = residual.has_value() ? residual->data_ptr() : nullptr,
                          .rounding = {stochastic, static_cast<uint64_t>(seed), data_or_null<int64_t>(step)}};
    run_reduce(args, wires.device());
    mark_written(out);
    mark_written(residual);
  }
}

template <bool runs>
void measure(at::TensorList grads, at::Tensor stats) {
  check_grads(grads);
  check_stats(stats, grads.front());
  if constexpr (runs) {
    const auto dense = as_contiguous(grads);
    const auto segments = lay_out(dense);
    run_measure({segments.data(), static_cast<int64_t>(segments.size()), dtype_of(dense.front().scalar_type()),
                 stats.data_ptr<double>()},
                stats.device(), new_workspace(stats.device()));
    mark_written(stats);
  }
}

template <bool runs>
void implement(torch::Library& library) {
  library.impl("pack", &pack<runs>);
  library.impl("unpack", &unpack<runs>);
  library.impl("reduce", &reduce<runs>);
  library.impl("measure", &measure<runs>);
}

}  // namespace

TORCH_LIBRARY(fastsync, library) {
  library.def(
      "pack(Tensor[] grads, Tensor(a!) wire, Tensor(b!) stats, Tensor? bucket_scale=None, Tensor(c!)[]? "
      "residuals=None, *, float multiplier=1.0, float? limit=None, bool stochastic=False, int seed=0, "
      "bool is_first=True, int alignment=1, Tensor? step=None, Tensor? weight=None) -> ()");
  library.def(
      "unpack(Tensor wire, Tensor(a!)[] grads, Tensor(b!) stats, Tensor(c!)? bucket_scale=None, *, "
      "float multiplier=1.0, bool is_first=True, bool is_last=True, Tensor(d!)? step=None, "
      "float scale_share=1.0) -> ()");
  library.def(
      "reduce(Tensor wires, Tensor(a!) out, Tensor? bucket_scale=None, Tensor(b!)? residual=None, *, "
      "ScalarType? grad_dtype=None, float multiplier=1.0, float? limit=None, bool stochastic=False, int seed=0, "
      "Tensor? step=None) -> ()");
  library.def("measure(Tensor[] grads, Tensor(a!) stats) -> ()");
}

TORCH_LIBRARY_IMPL(fastsync, CPU, library) { implement<true>(library); }
TORCH_LIBRARY_IMPL(fastsync, CUDA, library) { implement<true>(library); }

TORCH_LIBRARY_IMPL(fastsync, Meta, library) { implement<false>(library); }

// Sparse tensors get this far only to be refused by the checks, with a reason.
TORCH_LIBRARY_IMPL(fastsync, SparseCPU, library) { implement<false>(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCUDA, library) { implement<false>(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCsrCPU, library) { implement<false>(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCsrCUDA, library) { implement<false>(library); }

}  // namespace fastsync
