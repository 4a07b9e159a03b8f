#include "engine/snapshot.h"

namespace fastsync {

namespace {

// Whether Python may have seen the tensor. Always true if this version of PyTorch does not tell.
template <class TensorImpl>
bool python_has_seen(const TensorImpl& tensor) {
  if constexpr (requires { tensor.pyobj_slot()->load_pyobj(); }) {
    return tensor.pyobj_slot()->load_pyobj() != nullptr;
  } else {
    return true;
  }
}

}  // namespace

Snapshot::Snapshot(const at::Tensor& gradient) {
  if (gradient.defined()) {
    gradient_.emplace(gradient.getIntrusivePtr());
    version_ = gradient._version();
  }
}

bool Snapshot::is_of(const at::Tensor& gradient) const {
  return gradient_ && gradient.defined() && gradient_->_unsafe_get_target() == gradient.unsafeGetTensorImpl();
}

bool Snapshot::is_still(const at::Tensor& gradient) const {
  return gradient.defined() ? holds(gradient) && !python_has_seen(*gradient.unsafeGetTensorImpl()) : !gradient_;
}

bool Snapshot::was_written_by_autograd(const at::Tensor& gradient) const {
  return gradient.defined() && !holds(gradient) && !python_has_seen(*gradient.unsafeGetTensorImpl());
}

}  // namespace fastsync
