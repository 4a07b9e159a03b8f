// torch.ops.fastsync.*: the passes as operators. Schemas declare what is written; arguments are checked before anything
// is touched; the Meta kernels run the checks alone, which is all there is to an operator that returns nothing.
#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <vector>

#include "backend.h"

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

void check_wire(const at::Tensor& wire, at::TensorList grads) {
  const at::Tensor& grad = grads.front();
  const auto dtype = wire.scalar_type();
  TORCH_CHECK_VALUE(dtype == grad.scalar_type() || dtype == at::kHalf || dtype == at::kBFloat16,
                    "wire: expected the gradients' dtype (", grad.scalar_type(), "), float16 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(wire.device() == grad.device(), "wire: expected device ", grad.device(),
                    " like the gradients, got ", wire.device());
  c10::SymInt numel = 0;
  for (const at::Tensor& g : grads) {
    numel += g.sym_numel();
  }
  TORCH_CHECK_VALUE(wire.dim() == 1 && wire.is_contiguous() && wire.sym_numel() == numel,
                    "wire: expected a contiguous vector of ", numel, " elements, as many as the gradients have, got ",
                    wire.sym_sizes());
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

void check_pack(at::TensorList grads, const at::Tensor& wire, const at::Tensor& stats,
                const std::optional<at::Tensor>& bucket_scale, double multiplier, std::optional<double> limit) {
  check_grads(grads);
  check_wire(wire, grads);
  check_stats(stats, grads.front());
  check_bucket_scale(bucket_scale, grads.front());
  TORCH_CHECK_VALUE(std::isfinite(multiplier), "multiplier: expected a finite number, got ", multiplier);
  TORCH_CHECK_VALUE(!limit.has_value() || *limit > 0, "limit: expected a positive number or None, got ", *limit);
}

void pack(at::TensorList grads, at::Tensor wire, at::Tensor stats, const std::optional<at::Tensor>& bucket_scale,
          double multiplier, std::optional<double> limit) {
  check_pack(grads, wire, stats, bucket_scale, multiplier, limit);
  const auto dense = as_contiguous(grads);
  const auto segments = lay_out(dense);
  const PackArgs args{segments.data(),
                      static_cast<int64_t>(segments.size()),
                      dtype_of(dense.front().scalar_type()),
                      dtype_of(wire.scalar_type()),
                      wire.data_ptr(),
                      multiplier,
                      limit.value_or(std::numeric_limits<double>::infinity()),
                      data_or_null(bucket_scale.value_or(at::Tensor())),
                      stats.data_ptr<double>()};
  run_pack(args, wire.device(), new_workspace(wire.device()));
  mark_written(wire);
  mark_written(stats);
}

void check_unpack(const at::Tensor& wire, at::TensorList grads, const at::Tensor& stats,
                  const std::optional<at::Tensor>& bucket_scale) {
  check_grads(grads);
  check_wire(wire, grads);
  check_stats(stats, grads.front());
  check_bucket_scale(bucket_scale, grads.front());
}

void unpack(const at::Tensor& wire, at::TensorList grads, at::Tensor stats, std::optional<at::Tensor> bucket_scale) {
  check_unpack(wire, grads, stats, bucket_scale);
  check_writable(grads);
  std::vector<at::Tensor> dense;
  for (const at::Tensor& grad : grads) {
    dense.push_back(grad.is_contiguous() ? grad : at::empty(grad.sizes(), grad.options()));
  }
  const auto segments = lay_out(dense);
  const UnpackArgs args{segments.data(),
                        static_cast<int64_t>(segments.size()),
                        dtype_of(dense.front().scalar_type()),
                        dtype_of(wire.scalar_type()),
                        wire.data_ptr(),
                        data_or_null(bucket_scale.value_or(at::Tensor())),
                        stats.data_ptr<double>()};
  run_unpack(args, wire.device(), new_workspace(wire.device()));
  for (size_t i = 0; i < grads.size(); ++i) {
    if (dense[i].is_same(grads[i])) {
      mark_written(grads[i]);
    } else {
      grads[i].copy_(dense[i]);
    }
  }
  mark_written(stats);
  if (bucket_scale.has_value()) {
    mark_written(*bucket_scale);
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
               double multiplier, std::optional<double> limit) {
  check_pack(grads, wire, stats, bucket_scale, multiplier, limit);
}

void unpack_meta(const at::Tensor& wire, at::TensorList grads, at::Tensor stats,
                 std::optional<at::Tensor> bucket_scale) {
  check_unpack(wire, grads, stats, bucket_scale);
}

void measure_meta(at::TensorList grads, at::Tensor stats) { check_measure(grads, stats); }

void implement(torch::Library& library) {
  library.impl("pack", &pack);
  library.impl("unpack", &unpack);
  library.impl("measure", &measure);
}

void implement_checks(torch::Library& library) {
  library.impl("pack", &pack_meta);
  library.impl("unpack", &unpack_meta);
  library.impl("measure", &measure_meta);
}

}  // namespace

TORCH_LIBRARY(fastsync, library) {
  library.def(
      "pack(Tensor[] grads, Tensor(a!) wire, Tensor(b!) stats, Tensor? bucket_scale=None, *, float multiplier=1.0, "
      "float? limit=None) -> ()");
  library.def("unpack(Tensor wire, Tensor(a!)[] grads, Tensor(b!) stats, Tensor(c!)? bucket_scale=None) -> ()");
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
