#include "engine/random_state.h"

#include <mutex>

namespace fastsync {

void RandomState::keep() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* const numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
  kept_ = {numbers->engine(), numbers->next_float_normal_sample(), numbers->next_double_normal_sample()};
}

void RandomState::put_back() const {
  if (!kept_) {
    return;
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* const numbers = at::check_generator<at::CPUGeneratorImpl>(generator);
  numbers->set_engine(kept_->engine);
  numbers->set_next_float_normal_sample(kept_->next_float_normal);
  numbers->set_next_double_normal_sample(kept_->next_double_normal);
}

}  // namespace fastsync
