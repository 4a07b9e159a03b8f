#include "engine/elastic_step.h"

#include <cmath>
#include <utility>

namespace fastsync {

bool ElasticStep::goes_on(int64_t num_steps) {
  if (num_finished >= num_steps) {
    return false;  // index stays that of the last step
  }
  index = num_finished;
  was_entered = false;
  return true;
}

void ElasticStep::enter(std::vector<at::Tensor> buffers) {
  was_entered = is_inside = true;
  has_stepped = has_idled = false;
  before.keep(std::move(buffers));
  engine->end_interrupted();
  engine_step = engine->locked([&] { return engine->set_signal(wants_change ? 1.0F : 0.0F); });
}

bool ElasticStep::finish() {
  const double wishes = signals().value_or(0.0);
  if (std::isnan(wishes)) {
    return false;
  }
  is_inside = false;
  has_idled = !has_stepped;
  must_agree = wishes > 0.0;
  ++num_finished;
  return true;
}

bool ElasticStep::may_step() const {
  if (!is_inside) {
    return !is_in_loop;
  }
  const std::optional<double> wishes = has_stepped ? std::nullopt : signals();
  return wishes && !std::isnan(*wishes);
}

std::optional<double> ElasticStep::signals() const {
  return engine->locked([&] { return engine->signals(); });
}

}  // namespace fastsync
