#include "engine/parameter.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/from_blob.h>

#include "transport/strand.h"

namespace fastsync {

namespace {

at::Tensor as_reals(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient) : gradient;
}

// A tensor that only wraps others has none.
bool has_memory(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.numel() == 0 ||
         (tensor.has_storage() && tensor.storage().data() != nullptr);
}

// The same elements at the same places of a dense block of memory.
bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense() &&
         gradient.scalar_type() == parameter.scalar_type() && gradient.device() == parameter.device() &&
         !gradient.is_conj() && !gradient.is_neg();
}

// Dense, whatever the gradient is, with the strides that every rank's parameter has.
at::Tensor new_stand_in(const at::Tensor& parameter) {
  return at::empty_like(parameter, at::TensorOptions(), at::MemoryFormat::Preserve);
}

}  // namespace

at::Tensor Parameter::lock() const {
  at::Tensor locked(id.lock());
  TORCH_CHECK(locked.defined(), "fastsync: parameter ", name, " no longer exists");
  return locked;
}

void Parameter::lay_out(size_t in_bucket, size_t at_place) {
  bucket = in_bucket;
  place = at_place;
  numel = tensor.numel();
  dtype = tensor.scalar_type();
  device = tensor.device();
}

std::string Parameter::change() const {
  const bool is_in_bucket = bucket != kNone;
  if (takes_part() != is_in_bucket) {
    return c10::str("parameter ", name, is_in_bucket ? " was frozen" : " was unfrozen");
  }
  if (is_in_bucket && (tensor.numel() != numel || tensor.scalar_type() != dtype || tensor.device() != device)) {
    return c10::str("parameter ", name, " became another tensor");
  }
  return "";
}

void Parameter::check_gradient() const {
  const at::Tensor& gradient = tensor.grad();
  TORCH_CHECK_VALUE(!gradient.defined() || gradient.layout() == at::kStrided, "fastsync: parameter ", name,
                    " got a sparse gradient, which fastsync does not handle; use sparse=False in the embedding");
  TORCH_CHECK_VALUE(!gradient.defined() || has_memory(gradient), "fastsync: parameter ", name,
                    " got a gradient of a tensor subclass that has no memory of its own, such as a DTensor; give it a ",
                    "plain one (DTensor.to_local(), full_tensor())");
}

at::Tensor Parameter::gradient_to_send() {
  const at::Tensor& gradient = tensor.grad();
  if (has_new_gradient() && lies_like(gradient, tensor)) {
    return as_reals(gradient);
  }
  stand_in = new_stand_in(tensor);
  if (gradient.defined()) {
    check_gradient();
    stand_in.copy_(gradient);
  } else {
    stand_in.zero_();
  }
  return as_reals(stand_in);
}

at::Tensor Parameter::poison() const {
  return as_reals(new_stand_in(tensor).fill_(std::numeric_limits<double>::quiet_NaN()));
}

at::Tensor Parameter::average() const {
  const at::Tensor& average = stand_in.defined() ? stand_in : tensor.grad();
  return average.defined() ? as_reals(average) : average;
}

// Gradients lie in views from then on, but for one that is part of a graph, or of another dtype than its parameter.
void Parameter::take_view(const at::Tensor& average, bool exists) {
  at::Tensor& gradient = tensor.mutable_grad();
  if (!view.defined() || view.const_data_ptr() != average.const_data_ptr() || view.sizes() != tensor.sizes() ||
      view.strides() != tensor.strides()) {
    const at::Tensor like = at::empty_like(tensor, at::TensorOptions(at::kMeta), at::MemoryFormat::Preserve);
    view = at::from_blob(average.data_ptr(), like.sizes(), like.strides(), [average](void*) {}, tensor.options());
  }
  view.unsafeGetTensorImpl()->bump_version();
  const bool is_there = gradient.defined() && gradient.const_data_ptr() == view.const_data_ptr();
  if (!exists) {
    if (is_there) {
      gradient.copy_(stand_in);
    }
  } else if (is_there && gradient.sizes() == view.sizes() && lies_like(gradient, view)) {
    gradient.unsafeGetTensorImpl()->bump_version();
  } else if (gradient.defined() && (gradient.requires_grad() || gradient.scalar_type() != view.scalar_type()) &&
             at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
    gradient.copy_(is_there ? view.clone() : view);
  } else {
    gradient = view;
  }
}

void Parameter::take_average(bool exists, const at::Tensor& in_shared_memory) {
  at::Tensor& gradient = tensor.mutable_grad();
  if (in_shared_memory.defined()) {
    take_view(in_shared_memory, exists);
  } else if (stand_in.defined()) {
    use_on_current_stream(stand_in);
    if (exists && gradient.defined() && at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
      gradient.copy_(stand_in);
    } else if (exists) {
      gradient = stand_in;
    }
  } else {
    if (stream != current_stream(gradient.device())) {
      use_on_current_stream(gradient);
    }
    gradient.unsafeGetTensorImpl()->bump_version();  // the passes write through bare pointers
  }
  is_new = false;
  averaged.reset();
  if (gradient.defined()) {
    averaged.emplace(gradient.getIntrusivePtr());
    averaged_version = gradient._version();
  }
}

void Parameter::keep(bool counts) {
  if (counts) {
    stand_in.copy_(tensor.grad());
  } else {
    stand_in.fill_(0.0);
  }
}

bool Parameter::is_unchanged() const {
  const at::Tensor tensor(id.lock());
  if (bucket == kNone || !tensor.defined()) {
    return true;
  }
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined() || !averaged) {
    return gradient.defined() == averaged.has_value();
  }
  return averaged->_unsafe_get_target() == gradient.unsafeGetTensorImpl() && averaged_version == gradient._version();
}

}  // namespace fastsync
