// The current stream of a device: what waits for it, and what it goes on using. A CPU has no streams.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>

#include <optional>

namespace fastsync {

c10::Stream current_stream(c10::Device device);

// Marks how far the current stream has got, so that another stream can wait for that. Does nothing on a CPU.
class StreamMark {
 public:
  void set(c10::Device device);
  void wait() const;

 private:
  std::optional<c10::Event> event_;
};

// Keeps the tensor's memory until the current stream has done its work with it, even if another stream allocated it.
void use_on_current_stream(const at::Tensor& tensor);

// Makes a future of a tensor on the device.
c10::intrusive_ptr<c10::ivalue::Future> make_future(c10::Device device);

}  // namespace fastsync
