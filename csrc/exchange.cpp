#include "exchange.h"

#include <ATen/record_function.h>

#include <exception>

#include "without_python_objects.h"

namespace fastsync {

Coalescing::Coalescing(c10d::ProcessGroup& group, c10::Device device) : group_(group), guard_(device) {
  group_.startCoalescing(device.type());
}

Coalescing::~Coalescing() {
  if (!is_open_) {
    return;
  }
  try {
    end();
  } catch (const std::exception& error) {
    TORCH_WARN("fastsync: ending a group of calls after an error: ", error.what());
  }
}

c10::intrusive_ptr<c10d::Work> Coalescing::end() {
  is_open_ = false;
  return group_.endCoalescing(guard_.current_device().type());
}

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

namespace {

// From and to other addresses NCCL copies byte by byte.
void check_alignment(const at::Tensor& message) {
  TORCH_INTERNAL_ASSERT(reinterpret_cast<uintptr_t>(message.const_data_ptr()) % 16 == 0, "a message of ",
                        message.nbytes(), " bytes begins at no multiple of 16");
}

}  // namespace

void Exchange::expect(at::Tensor message, int64_t from) {
  check_alignment(message);
  expected_.emplace_back(std::move(message), static_cast<int>(from));
  if (device_.is_cpu()) {
    const WithoutPythonObjects without_python;
    works_.push_back(post_receive(expected_.back()));
  }
}

void Exchange::send(at::Tensor message, int64_t to) {
  check_alignment(message);
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
  Coalescing together(*group_, device_);
  for (Message& message : expected_) {
    post_receive(message);
  }
  for (Message& message : sent_) {
    post_send(message);
  }
  works_.push_back(together.end());
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
