#include "transport/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

namespace fastsync {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void StreamMark::set(c10::Device device) {
  if (!device.is_cpu()) {
    event_.emplace(device.type()).record(current_stream(device));
  }
}

void StreamMark::wait() const {
  if (event_) {
    event_->block(current_stream(event_->device()));
  }
}

void use_on_current_stream(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_cpu() && !tensor.is_sparse()) {
    tensor.record_stream(current_stream(tensor.device()));
  }
}

c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::Device device) {
  return c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), device.is_cpu() ? std::vector<c10::Device>() : std::vector<c10::Device>{device});
}

}  // namespace fastsync
