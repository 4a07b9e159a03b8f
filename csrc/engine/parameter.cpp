#include "engine/parameter.h"

#include <ATen/ATen.h>

#include <sstream>
#include <utility>

namespace fastsync {

namespace {

bool has_values(const at::Tensor& tensor) { return tensor.any().item<bool>(); }

}  // namespace

at::ScalarType grad_dtype_of(const at::Tensor& parameter) {
  return parameter.grad_dtype().value_or(parameter.scalar_type());
}

at::ScalarType real_dtype_of(const at::Tensor& parameter) { return c10::toRealValueType(grad_dtype_of(parameter)); }

int64_t num_reals_of(const at::Tensor& parameter) {
  return c10::isComplexType(grad_dtype_of(parameter)) ? 2 * parameter.numel() : parameter.numel();
}

at::Tensor Parameter::lock() const {
  at::Tensor locked(id.lock());
  TORCH_CHECK(locked.defined(), "fastsync: parameter ", name, " no longer exists");
  return locked;
}

std::string Parameter::description(const at::Tensor& tensor) const {
  std::ostringstream text;
  text << "parameter " << name << " of shape " << tensor.sizes() << ", strides " << tensor.strides() << ", "
       << tensor.scalar_type();
  if (const at::ScalarType dtype = grad_dtype_of(tensor); dtype != tensor.scalar_type()) {
    text << ", gradients of " << dtype;
  }
  text << (is_sparse ? ", sparse gradients" : "") << (tensor.requires_grad() ? "" : ", frozen") << "\n";
  return text.str();
}

bool Parameter::has_own_gradient(bool has_hook) const {
  if (has_hook && !is_new) {
    return false;
  }
  const at::Tensor tensor(id.lock());
  if (!tensor.defined() || !tensor.grad().defined() || tensor.numel() == 0) {
    return false;
  }
  return is_new || averaged.was_written_by_autograd(tensor.grad());
}

bool Parameter::has_left_over() const {
  const at::Tensor tensor(id.lock());
  return is_left_over && tensor.defined() && tensor.numel() > 0 && accumulated.holds(tensor.grad());
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
  if (left_over) {
    accumulated = Snapshot(grad_of(lock()));
  }
  is_new = op == Op::kMean || sum.defined() || !averaged.holds(lock().grad());  // else nothing has come
}

// zero_grad() is meant for the sum, too. Nobody can tell whether another change in place is. The host waits for the
// device only if there was such a change.
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

void Parameter::note_gradient(const at::Tensor& tensor) {
  const at::Tensor& gradient = grad_of(tensor);
  if (!gradient.defined()) {
    put_sum_back();  // nothing has come
    return;
  }
  TORCH_CHECK(sum.defined() || !is_sum(gradient) || averaged.holds(gradient), "fastsync: backward has added this ",
              "rank's gradient to the sum over the ranks that parameter ", name, " had, where a hook was put on it ",
              "since: call zero_grad() before backward()");
  if (op == Op::kSum) {
    accumulated = Snapshot(gradient);
  }
}

}  // namespace fastsync
