// torch.ops.fastsync.*: the passes as operators. Schemas declare what is written; arguments are checked before anything
// is touched; the Meta kernels run the checks alone, which is all there is to an operator that returns nothing.
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

void check_stats(const at::Tensor& stats, const at::Tensor& grad) {
  TORCH_CHECK_VALUE(stats.scalar_type() == at::kDouble && stats.sym_numel() == kNumStats && stats.is_contiguous() &&
                        stats.device() == grad.device(),
                    "stats: expected ", static_cast<int>(kNumStats), " contiguous float64 elements on ", grad.device(),
                    ", got ", stats.sym_sizes(), " ", stats.scalar_type(), " on ", stats.device());
}

constexpr int64_t kBlockBytes = sizeof(Int8Block);

c10::SymInt blocks_of(const c10::SymInt& numel) { return (numel + (kBlockValues - 1)) / kBlockValues; }

// One wire is a vector, several are the rows of a matrix.
int64_t num_rows(const at::Tensor& wires) { return wires.dim() == 2 ? wires.size(0) : 1; }
int64_t row_bytes(const at::Tensor& wires) {
  return wires.dim() == 2 ? wires.stride(0) * static_cast<int64_t>(wires.element_size()) : 0;
}
bool has_contiguous_rows(const at::Tensor& matrix) { return matrix.sym_stride(1) == 1 || matrix.sym_size(1) <= 1; }

// uint8 holds blocks of int8.
bool is_wire(at::ScalarType dtype, at::ScalarType full) {
  return dtype == full || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kByte;
}

c10::SymInt wire_numel(at::TensorList grads, at::ScalarType wire, int64_t alignment) {
  c10::SymInt numel = 0;
  for (const at::Tensor& grad : grads) {
    numel += wire == at::kByte ? blocks_of(grad.sym_numel()) * kBlockBytes
                               : (grad.sym_numel() + (alignment - 1)) / alignment * alignment;
  }
  return numel;
}

void check_dense(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, ": expected a dense tensor, got layout ", tensor.layout());
}

void check_wire(const at::Tensor& wire, at::TensorList grads, bool is_matrix = false, int64_t alignment = 1) {
  const at::Tensor& grad = grads.front();
  const auto dtype = wire.scalar_type();
  check_dense(wire, "wire");
  TORCH_CHECK_VALUE(is_wire(dtype, grad.scalar_type()), "wire: expected the gradients' dtype (", grad.scalar_type(),
                    "), float16, bfloat16 or uint8 (blocks of int8), got ", dtype);
  TORCH_CHECK_VALUE(wire.device() == grad.device(), "wire: expected device ", grad.device(),
                    " like the gradients, got ", wire.device());
  const c10::SymInt numel = wire_numel(grads, dtype, alignment);
  const char* const reason =
      dtype == at::kByte ? ", 132 for each block of 128 values, of which every gradient begins one"
      : alignment > 1    ? ", as many as the gradients have, each of them from a multiple of the alignment on"
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
  if (wire.scalar_type() == at::kByte && wire.numel() > 0) {
    const int64_t stride = wire.dim() == 2 && wire.size(0) > 1 ? wire.stride(0) : 0;
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(wire.data_ptr()) % alignof(Int8Block) == 0 &&
                          stride % static_cast<int64_t>(alignof(Int8Block)) == 0,
                      name, ": expected blocks of int8 to begin at multiples of ", alignof(Int8Block),
                      " bytes, got storage offset ", wire.storage_offset(), " and strides ", wire.strides());
  }
}

void check_bucket_scale(const std::optional<at::Tensor>& scale, const at::Tensor& grad) {
  if (!scale.has_value()) {
    return;
  }
  TORCH_CHECK_VALUE(scale->scalar_type() == at::kFloat && scale->sym_numel() == 1 && scale->device() == grad.device(),
                    "bucket_scale: expected one float32 element on ", grad.device(), ", got ", scale->sym_sizes(), " ",
                    scale->scalar_type(), " on ", scale->device());
}

std::vector<at::Tensor> as_contiguous(at::TensorList grads) {
  std::vector<at::Tensor> dense;
  dense.reserve(grads.size());
  for (const at::Tensor& grad : grads) {
    dense.push_back(grad.contiguous());
  }
  return dense;
}

void check_writable(at::TensorList grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK_VALUE(at::has_internal_overlap(grads[i]) != at::MemOverlap::Yes, "grads[", i,
                      "]: expected a tensor to ", "write to, got one whose elements share memory (shape ",
                      grads[i].sizes(), ", strides ", grads[i].strides(), "); clone it first");
  }
}

// Tells autograd that a tensor it may have saved is another one now.
void mark_written(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

void check_residual(const at::Tensor& residual, const c10::SymInt& numel, at::ScalarType dtype, c10::Device device,
                    const std::string& name) {
  TORCH_CHECK_VALUE(residual.layout() == at::kStrided && residual.scalar_type() == dtype &&
                        residual.device() == device && residual.sym_numel() == numel && residual.is_contiguous(),
                    name, ": expected a contiguous ", dtype, " tensor of ", numel, " elements on ", device, ", got ",
                    residual.sym_sizes(), " ", residual.scalar_type(), " on ", residual.device());
}

using OptionalList = std::optional<std::vector<at::Tensor>>;

at::TensorList list_of(const OptionalList& tensors) {
  return tensors.has_value() ? at::TensorList(*tensors) : at::TensorList();
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

void check_multiplier(double multiplier) {
  TORCH_CHECK_VALUE(std::isfinite(multiplier), "multiplier: expected a finite number, got ", multiplier);
}

void check_limit(std::optional<double> limit) {
  TORCH_CHECK_VALUE(!limit.has_value() || *limit > 0, "limit: expected a positive number or None, got ", *limit);
}

void check_rounding(bool stochastic, const at::Tensor& wire) {
  TORCH_CHECK_VALUE(!stochastic || wire.scalar_type() == at::kByte,
                    "stochastic: expected False, got True for a wire of ", wire.scalar_type(),
                    "; only uint8 (blocks of int8) is rounded so");
}

void check_gap(int64_t alignment) {
  TORCH_CHECK_VALUE(alignment >= 1 && alignment <= kBlockValues, "alignment: expected 1 to ", kBlockValues,
                    " elements, got ", alignment);
}

void check_step(const std::optional<at::Tensor>& step, c10::Device device) {
  TORCH_CHECK_VALUE(!step.has_value() || (step->scalar_type() == at::kLong && step->sym_numel() == 1 &&
                                          step->layout() == at::kStrided && step->device() == device),
                    "step: expected one int64 element on ", device, ", got ", step->sym_sizes(), " ",
                    step->scalar_type(), " on ", step->device());
}

int64_t* step_or_null(const std::optional<at::Tensor>& step) {
  return step.has_value() ? step->data_ptr<int64_t>() : nullptr;
}

void check_weight(const std::optional<at::Tensor>& weight, c10::Device device) {
  TORCH_CHECK_VALUE(!weight.has_value() || (weight->scalar_type() == at::kDouble && weight->sym_numel() == 1 &&
                                            weight->layout() == at::kStrided && weight->device() == device),
                    "weight: expected one float64 element on ", device, ", got ", weight->sym_sizes(), " ",
                    weight->scalar_type(), " on ", weight->device());
}

double limit_or_none(std::optional<double> limit) { return limit.value_or(std::numeric_limits<double>::infinity()); }

void check_pack(at::TensorList grads, const at::Tensor& wire, const at::Tensor& stats,
                const std::optional<at::Tensor>& bucket_scale, at::TensorList residuals, double multiplier,
                std::optional<double> limit, bool stochastic, int64_t alignment, const std::optional<at::Tensor>& step,
                const std::optional<at::Tensor>& weight) {
  check_grads(grads);
  check_gap(alignment);
  check_wire(wire, grads, /*is_matrix=*/false, alignment);
  check_stats(stats, grads.front());
  check_bucket_scale(bucket_scale, grads.front());
  check_residuals(residuals, grads);
  check_multiplier(multiplier);
  check_limit(limit);
  check_rounding(stochastic, wire);
  check_step(step, wire.device());
  check_weight(weight, wire.device());
}

void pack(at::TensorList grads, at::Tensor wire, at::Tensor stats, const std::optional<at::Tensor>& bucket_scale,
          const OptionalList& residuals, double multiplier, std::optional<double> limit, bool stochastic, int64_t seed,
          bool is_first, int64_t alignment, const std::optional<at::Tensor>& step,
          const std::optional<at::Tensor>& weight) {
  const at::TensorList kept = list_of(residuals);
  check_pack(grads, wire, stats, bucket_scale, kept, multiplier, limit, stochastic, alignment, step, weight);
  check_alignment(wire, "wire");
  const auto dense = as_contiguous(grads);
  const auto segments = lay_out(dense, dtype_of(wire.scalar_type()), kept, alignment);
  const PackArgs args{.segments = segments.data(),
                      .num_segments = static_cast<int64_t>(segments.size()),
                      .grad_dtype = dtype_of(dense.front().scalar_type()),
                      .wire_dtype = dtype_of(wire.scalar_type()),
                      .wire = wire.data_ptr(),
                      .multiplier = multiplier,
                      .limit = limit_or_none(limit),
                      .bucket_scale = data_or_null(bucket_scale.value_or(at::Tensor())),
                      .stats = stats.data_ptr<double>(),
                      .rounding = {stochastic, static_cast<uint64_t>(seed), step_or_null(step)},
                      .turn = {.is_first = is_first},
                      .alignment = alignment,
                      .weight = weight.has_value() ? weight->const_data_ptr<double>() : nullptr};
  run_pack(args, wire.device(), new_workspace(wire.device()));
  mark_written(wire);
  mark_written(stats);
  for (const at::Tensor& residual : kept) {
    mark_written(residual);
  }
}

void check_unpack(const at::Tensor& wire, at::TensorList grads, const at::Tensor& stats,
                  const std::optional<at::Tensor>& bucket_scale, double multiplier,
                  const std::optional<at::Tensor>& step, double scale_share) {
  check_grads(grads);
  check_wire(wire, grads, wire.dim() == 2);
  check_stats(stats, grads.front());
  check_bucket_scale(bucket_scale, grads.front());
  check_multiplier(multiplier);
  check_step(step, wire.device());
  TORCH_CHECK_VALUE(scale_share > 0 && std::isfinite(scale_share),
                    "scale_share: expected a finite number above 0, got ", scale_share);
}

void unpack(const at::Tensor& wire, at::TensorList grads, at::Tensor stats, std::optional<at::Tensor> bucket_scale,
            double multiplier, bool is_first, bool is_last, std::optional<at::Tensor> step, double scale_share) {
  check_unpack(wire, grads, stats, bucket_scale, multiplier, step, scale_share);
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
                        .bucket_scale = data_or_null(bucket_scale.value_or(at::Tensor())),
                        .stats = stats.data_ptr<double>(),
                        .num_wires = num_rows(wire),
                        .stride_bytes = row_bytes(wire),
                        .multiplier = multiplier,
                        .turn = {is_first, is_last},
                        .step = step_or_null(step),
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
  if (bucket_scale.has_value() && is_last) {
    mark_written(*bucket_scale);
  }
  if (step.has_value() && is_last) {
    mark_written(*step);
  }
}

// How many values a vector of a wire holds.
c10::SymInt num_values(const c10::SymInt& numel, at::ScalarType wire) {
  return wire == at::kByte ? numel / kBlockBytes * kBlockValues : numel;
}

void check_reduce(const at::Tensor& wires, const at::Tensor& out, const std::optional<at::Tensor>& bucket_scale,
                  const std::optional<at::Tensor>& residual, at::ScalarType grad_dtype, double multiplier,
                  std::optional<double> limit, bool stochastic, const std::optional<at::Tensor>& step) {
  TORCH_CHECK_VALUE(is_supported(grad_dtype), "grad_dtype: expected float32, float64, float16 or bfloat16, got ",
                    grad_dtype);
  check_dense(wires, "wires");
  check_dense(out, "out");
  const auto full = compute_dtype(grad_dtype);
  const auto from = wires.scalar_type();
  const auto to = out.scalar_type();
  TORCH_CHECK_VALUE(is_wire(from, full), "wires: expected ", full,
                    ", which the sums are taken in, float16, bfloat16 or uint8 (blocks of int8), got ", from);
  TORCH_CHECK_VALUE(wires.dim() == 2 && wires.sym_size(0) > 0 && has_contiguous_rows(wires),
                    "wires: expected a matrix of contiguous rows, got ", wires.sym_sizes(), " with strides ",
                    wires.sym_strides());
  TORCH_CHECK_VALUE(from != at::kByte || wires.sym_size(1) % kBlockBytes == 0,
                    "wires: expected rows of whole blocks of ", kBlockBytes, " bytes, got ", wires.sym_sizes());
  TORCH_CHECK_VALUE(to == from || to == full || (from == full && is_wire(to, full)), "out: expected ", from,
                    " like the wires, or ", full, ", which the sums are taken in, got ", to);
  TORCH_CHECK_VALUE(out.device() == wires.device(), "out: expected device ", wires.device(), " like the wires, got ",
                    out.device());
  const c10::SymInt numel = num_values(wires.sym_size(1), from);
  TORCH_CHECK_VALUE(out.dim() == 1 && out.is_contiguous() && num_values(out.sym_numel(), to) == numel &&
                        (to != at::kByte || out.sym_numel() % kBlockBytes == 0),
                    "out: expected a contiguous vector for ", numel, " values",
                    to == at::kByte ? ", 132 bytes for each 128 of them" : "", ", got ", out.sym_sizes());
  check_bucket_scale(bucket_scale, wires);
  if (residual.has_value()) {
    check_residual(*residual, numel, full, wires.device(), "residual");
  }
  check_multiplier(multiplier);
  check_limit(limit);
  check_rounding(stochastic, out);
  check_step(step, wires.device());
}

void reduce(const at::Tensor& wires, at::Tensor out, const std::optional<at::Tensor>& bucket_scale,
            std::optional<at::Tensor> residual, std::optional<at::ScalarType> grad_dtype, double multiplier,
            std::optional<double> limit, bool stochastic, int64_t seed, const std::optional<at::Tensor>& step) {
  const auto grad = grad_dtype.value_or(at::kFloat);
  check_reduce(wires, out, bucket_scale, residual, grad, multiplier, limit, stochastic, step);
  check_alignment(wires, "wires");
  check_alignment(out, "out");
  const ReduceArgs args{.wire = wires.data_ptr(),
                        .num_wires = wires.size(0),
                        .stride_bytes = row_bytes(wires),
                        .numel = num_values(wires.sym_size(1), wires.scalar_type()).expect_int(),
                        .grad_dtype = dtype_of(grad),
                        .wire_dtype = dtype_of(wires.scalar_type()),
                        .out = out.data_ptr(),
                        .out_dtype = dtype_of(out.scalar_type()),
                        .multiplier = multiplier,
                        .limit = limit_or_none(limit),
                        .bucket_scale = data_or_null(bucket_scale.value_or(at::Tensor())),
                        .residual = residual.has_value() ? residual->data_ptr() : nullptr,
                        .rounding = {stochastic, static_cast<uint64_t>(seed), step_or_null(step)}};
  run_reduce(args, wires.device());
  mark_written(out);
  if (residual.has_value()) {
    mark_written(*residual);
  }
}

void check_measure(at::TensorList grads, const at::Tensor& stats) {
  check_grads(grads);
  check_stats(stats, grads.front());
}

void measure(at::TensorList grads, at::Tensor stats) {
  check_measure(grads, stats);
  const auto dense = as_contiguous(grads);
  const auto segments = lay_out(dense);
  const MeasureArgs args{segments.data(), static_cast<int64_t>(segments.size()), dtype_of(dense.front().scalar_type()),
                         stats.data_ptr<double>()};
  run_measure(args, stats.device(), new_workspace(stats.device()));
  mark_written(stats);
}

void pack_meta(at::TensorList grads, at::Tensor wire, at::Tensor stats, const std::optional<at::Tensor>& bucket_scale,
               const OptionalList& residuals, double multiplier, std::optional<double> limit, bool stochastic,
               int64_t /*seed*/, bool /*is_first*/, int64_t alignment, const std::optional<at::Tensor>& step,
               const std::optional<at::Tensor>& weight) {
  check_pack(grads, wire, stats, bucket_scale, list_of(residuals), multiplier, limit, stochastic, alignment, step,
             weight);
}

void unpack_meta(const at::Tensor& wire, at::TensorList grads, at::Tensor stats, std::optional<at::Tensor> bucket_scale,
                 double multiplier, bool /*is_first*/, bool /*is_last*/, std::optional<at::Tensor> step,
                 double scale_share) {
  check_unpack(wire, grads, stats, bucket_scale, multiplier, step, scale_share);
}

void reduce_meta(const at::Tensor& wires, at::Tensor out, const std::optional<at::Tensor>& bucket_scale,
                 std::optional<at::Tensor> residual, std::optional<at::ScalarType> grad_dtype, double multiplier,
                 std::optional<double> limit, bool stochastic, int64_t /*seed*/,
                 const std::optional<at::Tensor>& step) {
  check_reduce(wires, out, bucket_scale, residual, grad_dtype.value_or(at::kFloat), multiplier, limit, stochastic,
               step);
}

void measure_meta(at::TensorList grads, at::Tensor stats) { check_measure(grads, stats); }

void implement(torch::Library& library) {
  library.impl("pack", &pack);
  library.impl("unpack", &unpack);
  library.impl("reduce", &reduce);
  library.impl("measure", &measure);
}

void implement_checks(torch::Library& library) {
  library.impl("pack", &pack_meta);
  library.impl("unpack", &unpack_meta);
  library.impl("reduce", &reduce_meta);
  library.impl("measure", &measure_meta);
}

}  // namespace

TORCH_LIBRARY(fastsync, library) {
  library.def(
      "pack(Tensor[] grads, Tensor(a!) wire, Tensor(b!) stats, Tensor? bucket_scale=None, Tensor(c!)[]? "
      "residuals=None, "
      "*, "
      "float multiplier=1.0, float? limit=None, bool stochastic=False, int seed=0, bool is_first=True, "
      "int alignment=1, Tensor? step=None, Tensor? weight=None) -> ()");
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

TORCH_LIBRARY_IMPL(fastsync, CPU, library) { implement(library); }
TORCH_LIBRARY_IMPL(fastsync, CUDA, library) { implement(library); }

TORCH_LIBRARY_IMPL(fastsync, Meta, library) { implement_checks(library); }

// Sparse tensors get this far only to be refused by the checks, with a reason.
TORCH_LIBRARY_IMPL(fastsync, SparseCPU, library) { implement_checks(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCUDA, library) { implement_checks(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCsrCPU, library) { implement_checks(library); }
TORCH_LIBRARY_IMPL(fastsync, SparseCsrCUDA, library) { implement_checks(library); }

}  // namespace fastsync
