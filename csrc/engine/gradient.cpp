#include "engine/gradient.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <iterator>
#include <limits>
#include <utility>

#include "passes/cuda_graphs.h"
#include "transport/streams.h"

namespace fastsync {

namespace {

at::Tensor as_reals(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient) : gradient;
}

// Whether the tensor has memory of its own. A tensor that only wraps others has none.
bool has_memory(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.numel() == 0 ||
         (tensor.has_storage() && tensor.storage().data() != nullptr);
}

// Whether the gradient can be sent as it is: it is sparse, or has its elements in the order that every rank sends.
bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  const bool has_order =
      gradient.is_sparse() || (gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense() &&
                               !gradient.is_conj() && !gradient.is_neg());
  return has_order && gradient.scalar_type() == grad_dtype_of(parameter) && gradient.device() == parameter.device();
}

// Makes a dense tensor with the strides of the parameter, which are the same on every rank; or a sparse one without
// rows.
at::Tensor new_stand_in(const at::Tensor& parameter, bool is_sparse) {
  const auto options = at::TensorOptions().dtype(grad_dtype_of(parameter));
  return is_sparse ? at::_sparse_coo_tensor_with_dims(/*sparse_dim=*/1, parameter.dim() - 1, parameter.sizes(),
                                                      options.device(parameter.device()).layout(at::kSparse))
                   : at::empty_like(parameter, options, at::MemoryFormat::Preserve);
}

}  // namespace

Gradient::Gradient(Parameter& parameter) : parameter_(&parameter), tensor_(parameter.lock()) {
  if (!is_here()) {
    parameter.sum.reset();  // zero_grad() was meant for it, too
  }
}

bool Gradient::mark_ready() {
  check();
  parameter_->mark_new(/*left_over=*/false);
  stream_ = current_stream(tensor_.device());
  return std::exchange(is_ready_, true);
}

void Gradient::check() const {
  const at::Tensor& gradient = grad_of(tensor_);
  TORCH_CHECK_VALUE(
      !gradient.defined() || parameter_->is_sparse || gradient.layout() == at::kStrided, "fastsync: parameter ",
      parameter_->name, " got a sparse gradient, and sparse ones are averaged ",
      "only with op=\"mean\", without shard_optimizer, and of embeddings that had sparse=True when fastsync was ",
      "given their module; pass the module in place of its parameters, or use sparse=False in the embedding");
  TORCH_CHECK_VALUE(
      !gradient.defined() || !parameter_->is_sparse || is_sparse_by_rows(gradient), "fastsync: parameter ",
      parameter_->name, " belongs to an embedding with sparse=True, and got a gradient that is not sparse ",
      "by rows, as from another layer with the same weight; use sparse=False in the embedding, and attach ",
      "again, on every rank");
  TORCH_CHECK_VALUE(!gradient.defined() || has_memory(gradient), "fastsync: parameter ", parameter_->name,
                    " got a gradient of a tensor subclass that has no memory of its own, such as a DTensor; give it a ",
                    "plain one (DTensor.to_local(), full_tensor())");
  TORCH_CHECK_VALUE(!gradient.defined() || gradient.sizes() == tensor_.sizes(), "fastsync: parameter ",
                    parameter_->name, " has the shape ", tensor_.sizes(), ", and its gradient has ", gradient.sizes(),
                    ": call zero_grad() where a parameter's data gets another shape");
  const at::ScalarType sent_as = grad_dtype_of(tensor_);
  TORCH_CHECK_VALUE(!gradient.defined() || c10::promoteTypes(gradient.scalar_type(), sent_as) == sent_as,
                    "fastsync: parameter ", parameter_->name, " got a gradient of ", gradient.scalar_type(), ", which ",
                    sent_as, " cannot hold; set its grad_dtype to the gradient's, on every rank");
}

// Returns whether none of the gradient's memory was claimed. Memory of which it is the only owner costs nothing here.
bool Gradient::claim_memory(ClaimedMemory& claimed) const {
  const at::Tensor& gradient = grad_of(tensor_);
  const bool has_other_owners = gradient.defined() && !gradient.is_sparse() && gradient.has_storage() &&
                                (gradient.storage().use_count() > 1 || gradient.use_count() > 1);
  if (!has_other_owners || gradient.numel() == 0 || !gradient.is_non_overlapping_and_dense()) {
    return true;
  }
  const auto* const begin = static_cast<const std::byte*>(gradient.const_data_ptr());
  const auto* const end = begin + gradient.nbytes();
  const auto next = claimed.lower_bound(begin);
  const bool is_claimed =
      (next != claimed.end() && next->first < end) || (next != claimed.begin() && std::prev(next)->second > begin);
  return !is_claimed && claimed.emplace(begin, end).second;
}

at::Tensor Gradient::to_send(ClaimedMemory& claimed) {
  const at::Tensor& gradient = grad_of(tensor_);
  lies_in_claimed_ = !claim_memory(claimed);
  if (parameter_->sum.defined()) {
    parameter_->check_sum(gradient);
  }
  if (is_new() && lies_like(gradient, tensor_) && !lies_in_claimed_) {
    return as_reals(gradient);
  }
  stand_in_ = new_stand_in(tensor_, parameter_->is_sparse);
  if (gradient.defined() && (parameter_->is_new || parameter_->old_travels(gradient))) {
    check();
    stand_in_.copy_(gradient);
  } else {
    stand_in_.zero_();
  }
  return as_reals(stand_in_);
}

at::Tensor Gradient::new_poison() const {
  return new_stand_in(tensor_, /*is_sparse=*/false).fill_(std::numeric_limits<double>::quiet_NaN());
}

at::Tensor Gradient::poison() const {
  return parameter_->is_sparse ? new_stand_in(tensor_, /*is_sparse=*/true) : as_reals(new_poison());
}

bool Gradient::take_mean(bool exists) {
  at::Tensor& gradient = tensor_.mutable_grad();
  const bool is_sum = !parameter_->is_new && parameter_->is_sum(gradient);
  const at::Tensor sum = is_sum ? gradient : std::exchange(parameter_->sum, {});
  const bool adds = exists && sum.defined();
  if (adds) {
    hold_for_graph(tensor_.device(), {sum});
  }
  if (stand_in_.defined()) {
    use_on_current_stream(stand_in_);
    if (adds) {
      gradient = sum.add_(std::exchange(stand_in_, {}));
    } else if (exists && gradient.defined() && !lies_in_claimed_ &&
               (gradient.is_sparse() || at::has_internal_overlap(gradient) != at::MemOverlap::Yes)) {
      gradient.copy_(stand_in_);
    } else if (exists) {
      gradient = stand_in_;
    }
  } else {
    if (stream_ != current_stream(gradient.device())) {
      use_on_current_stream(gradient);
    }
    gradient.unsafeGetTensorImpl()->bump_version();  // the passes write through bare pointers
    if (adds) {
      gradient = sum.add_(gradient);
    }
  }
  keep();
  return !adds;
}

void Gradient::keep() {
  parameter_->is_new = parameter_->is_left_over = false;
  parameter_->averaged = Snapshot(grad_of(tensor_));
}

bool Gradient::spoil() const {
  const at::Tensor& gradient = grad_of(tensor_);
  if (!gradient.defined() || gradient.numel() == 0) {
    return false;
  }
  gradient.fill_(std::numeric_limits<double>::quiet_NaN());
  return true;
}

bool Gradient::spoil_where(const at::Tensor& is_bad) const {
  const at::Tensor& gradient = grad_of(tensor_);
  if (!gradient.defined() || gradient.numel() == 0) {
    return false;
  }
  const at::Tensor first = gradient.variable_data().as_strided({1}, {1});
  first.masked_fill_(is_bad, std::numeric_limits<double>::quiet_NaN());
  return true;
}

void Gradient::count_kept_or_zeros(bool is_kept) {
  if (is_kept) {
    stand_in_.copy_(grad_of(tensor_));
  } else {
    stand_in_.fill_(0.0);
  }
}

at::Tensor Gradient::counted() const {
  const at::Tensor& counted = stand_in_.defined() ? stand_in_ : grad_of(tensor_);
  return counted.defined() ? as_reals(counted) : counted;
}

}  // namespace fastsync
