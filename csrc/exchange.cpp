#include "exchange.h"

#include <ATen/record_function.h>

#include "without_python_objects.h"

namespace fastsync {

Exchange::Exchange(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag)
    : group_(std::move(group)), device_(device), tag_(tag) {}

c10::intrusive_ptr<c10d::Work> Exchange::post_receive(Message& message) {
  std::vector<at::Tensor> tensors{message.first};
  return group_->recv(tensors, message.second, tag_);
}

c10::intrusive_ptr<c10d::Work> Exchange::post_send(Message& message) {
  std::vector<at::Tensor> tensors{message.first};
  return group_->send(tensors, message.second, tag_);
}

void Exchange::expect(at::Tensor message, int64_t from) {
  expected_.emplace_back(std::move(message), static_cast<int>(from));
  if (device_.is_cpu()) {
    const WithoutPythonObjects without_python;
    works_.push_back(post_receive(expected_.back()));
  }
}

void Exchange::send(at::Tensor message, int64_t to) {
  sent_bytes_ += static_cast<int64_t>(message.nbytes());
  sent_.emplace_back(std::move(message), static_cast<int>(to));
  if (device_.is_cpu()) {
    const WithoutPythonObjects without_python;
    works_.push_back(post_send(sent_.back()));
  }
}

void Exchange::start() {
  if (device_.is_cpu() || (expected_.empty() && sent_.empty())) {
    return;
  }
  const WithoutPythonObjects without_python;
  group_->startCoalescing(device_.type());
  for (Message& message : expected_) {
    post_receive(message);
  }
  for (Message& message : sent_) {
    post_send(message);
  }
  works_.push_back(group_->endCoalescing(device_.type()));
}

void Exchange::wait() {
  RECORD_FUNCTION("fastsync::wait", {});
  for (const auto& work : std::exchange(works_, {})) {
    work->wait();
  }
  expected_.clear();
  sent_.clear();
}

}  // namespace fastsync
