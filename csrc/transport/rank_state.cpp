#include "transport/rank_state.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

namespace fastsync {
namespace {

std::ostream& operator<<(std::ostream& out, const EngineStatus& status) {
  out << ' ' << std::quoted(status.engine) << ' ' << static_cast<int>(status.activity) << ' ' << status.step << ' '
      << std::quoted(status.why) << ' ' << status.passed_step << ' ' << status.passed.size();
  for (const int64_t number : status.passed) {
    out << ' ' << number;
  }
  return out;
}

std::istream& operator>>(std::istream& in, EngineStatus& status) {
  int activity = 0;
  size_t num_passed = 0;
  in >> std::quoted(status.engine) >> activity >> status.step >> std::quoted(status.why) >> status.passed_step >>
      num_passed;
  status.activity = static_cast<EngineStatus::Activity>(activity);
  for (int64_t number = 0; num_passed > 0 && in >> number; --num_passed) {
    status.passed.push_back(number);
  }
  return in;
}

}  // namespace

bool EngineStatus::has_passed(int64_t agreement, int64_t in_step) const {
  return passed_step >= in_step && std::find(passed.begin(), passed.end(), agreement) != passed.end();
}

std::string to_text(const Heartbeat& heartbeat) {
  std::ostringstream text;
  text << heartbeat.sent_at;
  for (const EngineStatus& engine : heartbeat.engines) {
    text << engine;
  }
  return text.str();
}

Heartbeat heartbeat_from(const std::string& text) {
  std::istringstream words(text);
  Heartbeat heartbeat;
  words >> heartbeat.sent_at;
  for (EngineStatus engine; words >> engine; engine = EngineStatus()) {
    heartbeat.engines.push_back(std::move(engine));
  }
  return heartbeat;
}

}  // namespace fastsync
