#include "engine/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

namespace fastsync {
namespace {

using Activity = EngineStatus::Activity;

// ---- one rank -------------------------------------------------------------------------------------------------------

std::string describe(const EngineStatus& engine) {
  const std::string step = c10::str("step ", engine.step, " of ", engine.engine);
  switch (engine.activity) {
    case Activity::kUnused:
      return "not yet in a sync of " + engine.engine;
    case Activity::kAgreeing:
      return c10::str("agreeing before ", step, ", because ", engine.why);
    case Activity::kAveraging:
      return "averaging in " + step;
    case Activity::kResting:
      return "in no sync, after " + step;
    case Activity::kBackwardFailed:
      return c10::str("past ", step, ", in which its backward failed");
    case Activity::kGathering:
      return "gathering in " + step;
  }
  return "";
}

std::string describe(const RankState& state) {
  std::string engines;
  for (const EngineStatus& engine : state.engines) {
    engines += (engines.empty() ? "" : " and ") + describe(engine);
  }
  if (state.answers) {
    return engines;
  }
  return c10::str("no answer, so it is stopped or gone, or has no engine of this group",
                  state.age ? c10::str(", last heard of ", state.age->count(), " s ago: ", engines) : "");
}

std::string name_of(const RankState& state) {
  return c10::str(state.rank, state.global_rank == state.rank ? "" : c10::str(" (global ", state.global_rank, ")"));
}

// ---- all ranks ------------------------------------------------------------------------------------------------------

// Describes where the ranks are. Missing ranks come first, then ranks that are elsewhere, and last ranks that are where
// this rank is.
std::string where_ranks_are(const std::vector<RankState>& states, int64_t own_rank) {
  const std::string own = describe(states[own_rank]);
  std::map<std::pair<int, std::string>, std::string> ranks_at;
  for (const RankState& state : states) {
    const std::string at = describe(state);
    std::string& ranks = ranks_at[{!state.answers ? 0 : at != own ? 1 : 2, at}];
    ranks += (ranks.empty() ? "rank " : ", ") + name_of(state);
  }
  std::string text;
  for (const auto& [at, ranks] : ranks_at) {
    text += c10::str(text.empty() ? ". Where the ranks are: " : "; ", ranks, ": ", at.second);
  }
  return text;
}

bool any_is(Activity activity, const std::vector<RankState>& states) {
  return std::ranges::any_of(states, [&](const RankState& state) {
    return std::ranges::any_of(state.engines, [&](const EngineStatus& engine) { return engine.activity == activity; });
  });
}

// Tells what may help, given where the ranks are.
std::string advice_on(const std::vector<RankState>& states, const std::string& join) {
  const bool one_did_it_alone = any_is(Activity::kAgreeing, states) && any_is(Activity::kAveraging, states);
  const bool one_has_ended = std::ranges::any_of(states, [](const RankState& state) { return !state.answers; });
  std::string advice;
  if (one_did_it_alone) {
    advice += ". Do what is said after 'because' on every rank, between the same steps, or on none";
  }
  if (one_has_ended) {
    advice += ". Look first at the output of the rank that gives no answer";
  } else if (any_is(Activity::kResting, states) && !join.empty()) {
    advice += ". Where ranks have different numbers of batches, put the training loop inside `" + join + "`";
  }
  return advice;
}

std::string who_is_missing(Liveness& liveness) {
  try {
    const std::vector<RankState> states = liveness.note_failure();
    return states.empty() ? "" : where_ranks_are(states, liveness.rank()) + advice_on(states, liveness.join());
  } catch (const c10::Error& error) {
    return c10::str(". Where the other ranks are is not known, for ", error.what_without_backtrace());
  }
}

}  // namespace

// An error of this rank's own has a type of its own, as all of torch's have that tell what is wrong: no memory, a wrong
// dtype, a broken device. What a wait throws is a DistError, or tells no more than its words.
void guard(const std::string& beginning, Liveness& liveness, const std::function<void()>& call) {
  std::string why;
  try {
    return call();
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::bad_alloc& error) {
    C10_THROW_ERROR(OutOfMemoryError, c10::str(beginning, ": ", error.what()));
  } catch (c10::DistError& error) {
    error.add_context(beginning + who_is_missing(liveness));
    throw;
  } catch (c10::Error& error) {
    if (typeid(error) != typeid(c10::Error)) {
      error.add_context(beginning);
      throw;
    }
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  TORCH_CHECK(false, beginning, ": ", why, who_is_missing(liveness));
}

}  // namespace fastsync
