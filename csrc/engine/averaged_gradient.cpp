#include "engine/averaged_gradient.h"

namespace fastsync {

namespace {

// A PyTorch whose tensors do not tell has always seen it.
template <class TensorImpl>
bool python_has_seen(const TensorImpl& tensor) {
  if constexpr (requires { tensor.pyobj_slot()->load_pyobj(); }) {
    return tensor.pyobj_slot()->load_pyobj() != nullptr;
  } else {
    return true;
  }
}

}  // namespace

AveragedGradient::AveragedGradient(const at::Tensor& gradient) {
  if (gradient.defined()) {
    gradient_.emplace(gradient.getIntrusivePtr());
    version_ = gradient._version();
  }
}

bool AveragedGradient::is_still(const at::Tensor& gradient) const {
  return gradient.defined() ? is_as_it_was(gradient) && !python_has_seen(*gradient.unsafeGetTensorImpl()) : !gradient_;
}

bool AveragedGradient::was_written_by_autograd(const at::Tensor& gradient) const {
  return gradient.defined() && !is_as_it_was(gradient) && !python_has_seen(*gradient.unsafeGetTensorImpl());
}

bool AveragedGradient::is_as_it_was(const at::Tensor& gradient) const {
  return gradient_ && gradient_->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
         version_ == gradient._version();
}

}  // namespace fastsync
