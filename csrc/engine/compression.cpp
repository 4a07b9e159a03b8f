#include "engine/compression.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <limits>
#include <sstream>

#include "sums/bucket.h"

namespace fastsync {

namespace {

constexpr double kIndistinguishable = 1.03;
// Below so many bytes that each rank sends more than two_shot would, one step of the network costs less than two.
constexpr int64_t kOneShotBytes = 1 << 16;
// In memory that ranks share, where two ranks never move less in two steps.
constexpr int64_t kOneShotBytesInMemory = 1 << 17;
// Between two ranks both send as much, and full width may go either way: see algorithm_for.
constexpr int64_t kOneShotBytesOfTwo = 1 << 22;

constexpr std::array kWires{std::pair("none", Wire::kNone), std::pair("fp16", Wire::kFloat16),
                            std::pair("bf16", Wire::kBFloat16), std::pair("int8", Wire::kInt8)};
constexpr std::array kAlgorithms{std::pair("all_reduce", Algorithm::kAllReduce),
                                 std::pair("one_shot", Algorithm::kOneShot),
                                 std::pair("two_shot", Algorithm::kTwoShot)};

template <class Names>
auto value_of(const Names& names, const std::string& name, const char* what) {
  const auto found = std::find_if(names.begin(), names.end(), [&](const auto& entry) { return name == entry.first; });
  if (found == names.end()) {
    std::string expected;
    for (const auto& entry : names) {
      expected += (expected.empty() ? "'" : ", '") + std::string(entry.first) + "'";
    }
    TORCH_CHECK_VALUE(false, what, ": expected one of ", expected, ", got '", name, "'");
  }
  return found->second;
}

template <class Names, class Value>
const char* name_of(const Names& names, Value value) {
  return std::find_if(names.begin(), names.end(), [&](const auto& entry) { return value == entry.second; })->first;
}

std::string describe(const Schedule::Phase& phase) {
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  for (const Candidate& candidate : phase.candidates) {
    text << (&candidate == &phase.candidates.front() ? "" : " or ") << describe(candidate.compression);
    for (const auto& [numel, seconds] : candidate.times) {
      text << " " << numel << ":" << seconds;
    }
  }
  if (phase.first_step > 0) {
    text << " from step " << phase.first_step;
  }
  return text.str();
}

}  // namespace

Wire wire_from_name(const std::string& name) { return value_of(kWires, name, "wire"); }

Algorithm algorithm_from_name(const std::string& name) { return value_of(kAlgorithms, name, "algorithm"); }

std::string describe(const Compression& compression) {
  std::string text = name_of(kWires, compression.wire);
  text += compression.sums_in_float32 ? ", reduce fp32" : "";
  text += compression.error_feedback ? ", error_feedback" : "";
  text += compression.algorithm ? std::string(", ") + name_of(kAlgorithms, *compression.algorithm) : "";
  text += compression.ranks_per_node > 1 ? c10::str(", ", compression.ranks_per_node, " ranks per node") : "";
  return text;
}

DType wire_dtype(Wire wire, DType grad) {
  switch (wire) {
    case Wire::kNone:
      return grad;
    case Wire::kFloat16:
      return DType::kFloat16;
    case Wire::kBFloat16:
      return DType::kBFloat16;
    case Wire::kInt8:
      return DType::kInt8;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// Sums of two float32 values are the same in whatever order and whoever takes them, so between two ranks full width
// need not go through all_reduce, whose steps take longer on Gloo. Where bandwidth is all that counts, its ring is
// as fast, and needs less memory.
Algorithm algorithm_for(const Compression& compression, DType grad, int64_t numel, const Team& team) {
  const int64_t world_size = team.size();
  if (compression.ranks_per_node > 1) {
    return Algorithm::kTwoLevel;
  }
  if (team.shares_memory()) {
    const int64_t bytes = bytes_of(numel, wire_dtype(compression.wire, grad));
    const bool is_fast_at_once = world_size == 2 || bytes <= kOneShotBytesInMemory;
    return compression.algorithm.value_or(is_fast_at_once ? Algorithm::kOneShot : Algorithm::kTwoShot);
  }
  if (!compression.sums_in_float32) {
    const bool is_exact = compression.wire == Wire::kNone && (grad == DType::kFloat32 || grad == DType::kFloat64);
    const bool is_small = bytes_of(numel, grad) <= kOneShotBytesOfTwo;
    return is_exact && is_small && world_size == 2 && team.sends_at_once() ? Algorithm::kOneShot
                                                                           : Algorithm::kAllReduce;
  }
  return rank_sum_for(compression, grad, numel, world_size);
}

Algorithm rank_sum_for(const Compression& compression, DType grad, int64_t numel, int64_t num_members) {
  const int64_t bytes = bytes_of(numel, wire_dtype(compression.wire, grad));
  const bool is_fast_at_once = (num_members - 1) * (num_members - 2) * bytes <= kOneShotBytes * num_members;
  return compression.algorithm.value_or(is_fast_at_once ? Algorithm::kOneShot : Algorithm::kTwoShot);
}

double predict(const Candidate& candidate, int64_t numel) {
  const auto& times = candidate.times;
  if (times.size() < 2 || numel <= times.front().first) {
    return times.empty() ? 0.0 : times.front().second;
  }
  auto right = std::lower_bound(times.begin() + 1, times.end() - 1, numel,
                                [](const auto& time, int64_t value) { return time.first < value; });
  const auto& [from, from_seconds] = *(right - 1);
  const auto& [to, to_seconds] = *right;
  return from_seconds +
         (to_seconds - from_seconds) * static_cast<double>(numel - from) / static_cast<double>(to - from);
}

size_t choose(const std::vector<Candidate>& candidates, int64_t numel) {
  double least = std::numeric_limits<double>::infinity();
  for (const Candidate& candidate : candidates) {
    least = std::min(least, predict(candidate, numel));
  }
  const auto first = std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
    return predict(candidate, numel) <= kIndistinguishable * least;
  });
  return first == candidates.end() ? 0 : static_cast<size_t>(first - candidates.begin());
}

Schedule::Schedule(std::vector<Phase> phases) : phases_(std::move(phases)) {
  TORCH_CHECK_VALUE(!phases_.empty() && phases_.front().first_step == 0, "schedule: its first phase begins at step 0");
  for (const Phase& phase : phases_) {
    TORCH_CHECK_VALUE(!phase.candidates.empty(), "schedule: the phase from step ", phase.first_step, " is empty");
    description_ += (description_.empty() ? "compression " : "; ") + describe(phase);
  }
}

const Compression& Schedule::at(int64_t step, int64_t numel) const {
  const auto next =
      std::find_if(phases_.begin() + 1, phases_.end(), [&](const Phase& phase) { return phase.first_step > step; });
  const auto& candidates = (next - 1)->candidates;
  return candidates[candidates.size() == 1 ? 0 : choose(candidates, numel)].compression;
}

bool Schedule::is_lossless() const {
  return std::all_of(phases_.begin(), phases_.end(), [](const Phase& phase) {
    return std::all_of(phase.candidates.begin(), phase.candidates.end(),
                       [](const Candidate& candidate) { return candidate.compression.wire == Wire::kNone; });
  });
}

}  // namespace fastsync
