#include "engine/before_step.h"

#include <ATen/ATen.h>

#include <mutex>
#include <utility>

namespace fastsync {

namespace {

bool have_same_kind(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.strides() == other.strides() && one.dtype() == other.dtype() &&
         one.device() == other.device();
}

}  // namespace

void BeforeStep::keep(std::vector<at::Tensor> buffers) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* const numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
    random_ = {numbers->engine(), numbers->next_float_normal_sample(), numbers->next_double_normal_sample()};
  }
  buffers_ = std::move(buffers);
  copies_.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (copies_[i].defined() && have_same_kind(copies_[i], buffers_[i])) {
      copies_[i].copy_(buffers_[i]);
    } else {
      copies_[i] = buffers_[i].detach().clone();
    }
  }
}

void BeforeStep::put_back() {
  const at::NoGradGuard no_grad;
  if (random_) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* const numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
    numbers->set_engine(random_->engine);
    numbers->set_next_float_normal_sample(random_->next_float_normal);
    numbers->set_next_double_normal_sample(random_->next_double_normal);
  }
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i].copy_(copies_[i]);
  }
}

}  // namespace fastsync
