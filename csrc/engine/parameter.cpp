#include "engine/parameter.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "transport/progress_thread.h"

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

// The same elements at the same places of a dense block of memory, as every rank's gradient travels.
bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense() &&
         gradient.scalar_type() == grad_dtype_of(parameter) && gradient.device() == parameter.device() &&
         !gradient.is_conj() && !gradient.is_neg();
}

// Dense, whatever the gradient is, with the strides that every rank's parameter has.
at::Tensor new_stand_in(const at::Tensor& parameter) {
  return at::empty_like(parameter, at::TensorOptions().dtype(grad_dtype_of(parameter)), at::MemoryFormat::Preserve);
}

bool has_values(const at::Tensor& tensor) { return tensor.any().item<bool>(); }

}  // namespace

at::ScalarType grad_dtype_of(const at::Tensor& parameter) {
  return parameter.grad_dtype().value_or(parameter.scalar_type());
}

at::Tensor Parameter::lock() const {
  at::Tensor locked(id.lock());
  TORCH_CHECK(locked.defined(), "fastsync: parameter ", name, " no longer exists");
  return locked;
}

at::Tensor Parameter::outline() const {
  return at::empty({1}, tensor.options().dtype(real_dtype())).expand({num_reals()});
}

void Parameter::lay_out(size_t in_bucket, size_t at_place) {
  bucket = in_bucket;
  place = at_place;
  sizes = tensor.sizes().vec();
  strides = tensor.strides().vec();
  dtype = grad_dtype_of(tensor);
  device = tensor.device();
}

std::string Parameter::change() const {
  const bool is_in_bucket = bucket != kNone;
  if (takes_part() != is_in_bucket) {
    return c10::str("parameter ", name, is_in_bucket ? " was frozen" : " was unfrozen");
  }
  if (is_in_bucket && (tensor.sizes() != sizes || grad_dtype_of(tensor) != dtype || tensor.device() != device)) {
    return c10::str("parameter ", name, " became another tensor");
  }
  if (is_in_bucket && tensor.strides() != strides) {
    return c10::str("parameter ", name, " lies in memory in another order, as after to(memory_format=...)");
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
  TORCH_CHECK_VALUE(!gradient.defined() || gradient.sizes() == tensor.sizes(), "fastsync: parameter ", name,
                    " has the shape ", tensor.sizes(), ", and its gradient has ", gradient.sizes(),
                    ": call zero_grad() where a parameter's data gets another shape");
  const at::ScalarType sent_as = grad_dtype_of(tensor);
  TORCH_CHECK_VALUE(!gradient.defined() || c10::promoteTypes(gradient.scalar_type(), sent_as) == sent_as,
                    "fastsync: parameter ", name, " got a gradient of ", gradient.scalar_type(), ", which ", sent_as,
                    " cannot hold; set its grad_dtype to the gradient's, on every rank");
}

at::Tensor Parameter::gradient_to_send() {
  const at::Tensor& gradient = tensor.grad();
  if (sum.defined()) {
    check_sum(gradient);
  }
  if (has_new_gradient() && lies_like(gradient, tensor)) {
    return as_reals(gradient);
  }
  stand_in = new_stand_in(tensor);
  if (gradient.defined() && (is_new || !is_sum(gradient))) {
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

bool Parameter::take_average(bool exists) {
  at::Tensor& gradient = tensor.mutable_grad();
  const at::Tensor before = !is_new && is_sum(gradient) ? gradient : std::exchange(sum, {});
  const bool adds = exists && before.defined();
  if (stand_in.defined()) {
    use_on_current_stream(stand_in);
    if (adds) {
      gradient = before.add_(std::exchange(stand_in, {}));
    } else if (exists && gradient.defined() && at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
      gradient.copy_(stand_in);
    } else if (exists) {
      gradient = stand_in;
    }
  } else {
    if (stream != current_stream(gradient.device())) {
      use_on_current_stream(gradient);
    }
    gradient.unsafeGetTensorImpl()->bump_version();  // the passes write through bare pointers
    if (adds) {
      gradient = before.add_(gradient);
    }
  }
  is_new = is_left_over = false;
  averaged = Snapshot(gradient);
  return !adds;
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
  if (!tensor.defined() || (bucket == kNone && !tensor.requires_grad())) {
    return true;
  }
  return averaged.is_still(tensor.grad());
}

bool Parameter::has_own_gradient(bool has_hook) const {
  if (has_hook && !is_new) {
    return false;
  }
  const at::Tensor tensor(id.lock());
  if (!tensor.defined() || !tensor.grad().defined()) {
    return false;
  }
  return is_new || averaged.was_written_by_autograd(tensor.grad());
}

bool Parameter::has_left_over() const {
  const at::Tensor tensor(id.lock());
  return is_left_over && tensor.defined() && accumulated.holds(tensor.grad());
}

void Parameter::take_over(Parameter& other) {
  is_new = other.is_new;
  is_left_over = other.is_left_over;
  averaged = other.averaged;
  accumulated = other.accumulated;
  sum = std::exchange(other.sum, {});
}

// ---- sums -----------------------------------------------------------------------------------------------------------

void Parameter::put_sum_aside() {
  const at::Tensor parameter = lock();
  at::Tensor& gradient = parameter.mutable_grad();
  if (sum.defined()) {
    check_sum(gradient);
  }
  if (!is_sum(gradient)) {
    return;
  }
  if (gradient.is_cpu() && !averaged.holds(gradient) && !has_values(gradient)) {
    averaged = {};  // zero_grad(set_to_none=False) has left no sum
  } else {
    sum = std::exchange(gradient, {});
  }
}

void Parameter::mark_new(bool left_over) {
  is_left_over = left_over;
  is_new = !sums || sum.defined() || !averaged.holds(lock().grad());  // else nothing has come
}

// zero_grad() is meant for the sum, too. What else may be meant, by a change in place, nobody can tell. Only there does
// the host wait for the device.
void Parameter::check_sum(const at::Tensor& gradient) {
  if (accumulated.holds(gradient)) {
    return;
  }
  if (!accumulated.is_of(gradient) || !has_values(gradient)) {
    sum.reset();
  }
  TORCH_CHECK(!sum.defined() || !has_values(sum), "fastsync: the gradient of parameter ", name,
              " was changed in place ",
              "after a backward inside no_sync(), when the sum of an earlier sync was still to be added to it: ",
              "call zero_grad() after each step, or change gradients after the sync");
}

void Parameter::put_sum_back() {
  if (sum.defined()) {
    const at::Tensor parameter = lock();
    at::Tensor& gradient = parameter.mutable_grad();
    gradient = gradient.defined() ? sum.add_(gradient) : sum;
    sum.reset();
  }
}

void Parameter::note_gradient() {
  const at::Tensor parameter = lock();
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) {
    put_sum_back();  // nothing has come
    return;
  }
  TORCH_CHECK(sum.defined() || !is_sum(gradient) || averaged.holds(gradient), "fastsync: backward has added this ",
              "rank's gradient to the sum over the ranks that parameter ", name, " had, where a hook was put on it ",
              "since: call zero_grad() before backward()");
  accumulated = Snapshot(gradient);
}

}  // namespace fastsync
