// The state of a rank and of its engines, which heartbeats carry to the other ranks.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fastsync {

struct EngineStatus {
  enum class Activity {
    kUnused,          // it has not begun a step yet
    kAgreeing,        // it waits until the ranks agree on something, before the step
    kAveraging,       // it averages gradients in the step
    kResting,         // it waits for nobody, after the step
    kBackwardFailed,  // it waits for nobody, because its backward has failed in the step
    kGathering,       // it gathers parameters in the step
  };

  // Whether the engine is in a step. The rank is then in that step too, even if its other engines rest.
  bool is_in_step() const { return activity != Activity::kUnused && activity != Activity::kResting; }
  // Whether the engine has passed the agreement of this number, in this step or in a later one. See Note [Agreement] in
  // engine/bucket.h.
  bool has_passed(int64_t agreement, int64_t in_step) const;

  std::string engine;  // its name in errors
  Activity activity = Activity::kUnused;
  int64_t step = -1;            // the step of the activity
  std::string why;              // the reason why the ranks have to agree, while they do
  int64_t passed_step = -1;     // the newest step in which the engine has passed agreements
  std::vector<int64_t> passed;  // the numbers of the agreements that it has passed in that step
};

// One rank of a group, as another rank sees it.
struct RankState {
  int64_t rank = 0;
  int64_t global_rank = 0;  // the same as rank where it is not known
  bool answers = false;     // it has sent a heartbeat while this rank listened
  // The age of its newest heartbeat, if that tells how long the rank is silent.
  std::optional<std::chrono::seconds> age;
  // The rank's engines that are in a step. If none is, only the newest engine of the group.
  std::vector<EngineStatus> engines;
};

struct Heartbeat {
  int64_t sent_at = 0;  // in milliseconds since 1970, by the sender's clock
  // First the engines of other groups that are in a step. Then all engines of the group, from the oldest to the newest.
  std::vector<EngineStatus> engines;
};

// Writes a heartbeat as a text for the group's store.
std::string to_text(const Heartbeat& heartbeat);
// Reads such a text. Returns an empty heartbeat for an empty text.
Heartbeat heartbeat_from(const std::string& text);

// Returns what two reads of all ranks' heartbeats tell of each rank, but for global_rank. With only_answers, a
// heartbeat that has not changed tells nothing.
std::vector<RankState> rank_states_of(const std::vector<std::string>& before, const std::vector<std::string>& after,
                                      bool only_answers);
// Writes them as a text, and reads it. Ranks whose engines are at the same place share the words for it.
std::string to_text(const std::vector<RankState>& states);
std::vector<RankState> rank_states_from(const std::string& text);

int64_t milliseconds_since_1970();

}  // namespace fastsync
