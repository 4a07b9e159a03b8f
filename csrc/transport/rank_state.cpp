#include "transport/rank_state.h"

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <map>
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

std::string to_text(const std::vector<EngineStatus>& engines) {
  std::ostringstream text;
  for (const EngineStatus& engine : engines) {
    text << engine;
  }
  return text.str();
}

std::vector<EngineStatus> engines_from(std::istream& words) {
  std::vector<EngineStatus> engines;
  for (EngineStatus engine; words >> engine; engine = EngineStatus()) {
    engines.push_back(std::move(engine));
  }
  return engines;
}

// The engines that are in a step, or else the newest one.
std::vector<EngineStatus> where_it_is(std::vector<EngineStatus> engines) {
  std::vector<EngineStatus> in_step;
  std::ranges::copy_if(engines, std::back_inserter(in_step), &EngineStatus::is_in_step);
  return in_step.empty() && !engines.empty() ? std::vector{std::move(engines.back())} : in_step;
}

}  // namespace

int64_t milliseconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

bool EngineStatus::has_passed(int64_t agreement, int64_t in_step) const {
  return passed_step >= in_step && std::find(passed.begin(), passed.end(), agreement) != passed.end();
}

std::string to_text(const Heartbeat& heartbeat) {
  return std::to_string(heartbeat.sent_at) + to_text(heartbeat.engines);
}

Heartbeat heartbeat_from(const std::string& text) {
  std::istringstream words(text);
  Heartbeat heartbeat;
  words >> heartbeat.sent_at;
  heartbeat.engines = engines_from(words);
  return heartbeat;
}

std::vector<RankState> rank_states_of(const std::vector<std::string>& before, const std::vector<std::string>& after,
                                      bool only_answers) {
  std::vector<RankState> states;
  for (size_t rank = 0; rank < after.size(); ++rank) {
    RankState& state = states.emplace_back();
    state.rank = static_cast<int64_t>(rank);
    state.answers = before[rank] != after[rank];
    if (after[rank].empty() || (only_answers && !state.answers)) {
      continue;
    }
    Heartbeat newest = heartbeat_from(after[rank]);
    state.age = std::chrono::seconds(std::max<int64_t>(0, milliseconds_since_1970() - newest.sent_at) / 1000);
    state.engines = where_it_is(std::move(newest.engines));
  }
  return states;
}

std::string to_text(const std::vector<RankState>& states) {
  std::map<std::string, std::vector<const RankState*>> alike;
  for (const RankState& state : states) {
    alike[to_text(state.engines)].push_back(&state);
  }
  std::ostringstream text;
  for (const auto& [engines, ranks] : alike) {
    text << std::quoted(engines) << ' ' << ranks.size();
    for (const RankState* const state : ranks) {
      text << ' ' << state->rank << ' ' << state->answers << ' ' << (state->age ? state->age->count() : -1);
    }
    text << '\n';
  }
  return text.str();
}

std::vector<RankState> rank_states_from(const std::string& text) {
  std::vector<RankState> states;
  std::istringstream words(text);
  std::string engines;
  for (size_t count = 0; words >> std::quoted(engines) >> count;) {
    std::istringstream of_engines(engines);
    const std::vector<EngineStatus> shared = engines_from(of_engines);
    int64_t age = 0;
    for (RankState state; count > 0 && words >> state.rank >> state.answers >> age; --count) {
      state.age = age < 0 ? std::nullopt : std::optional(std::chrono::seconds(age));
      state.engines = shared;
      states.push_back(state);
    }
  }
  std::ranges::sort(states, {}, &RankState::rank);
  return states;
}

}  // namespace fastsync
