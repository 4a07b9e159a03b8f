#include "engine/compression.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <utility>

#include "sums/bucket.h"

namespace fastsync {

namespace {

// Below so many bytes that each rank sends more than two_shot would, one step of the network costs less than two.
constexpr int64_t kOneShotBytes = 1 << 16;
// In memory that ranks share, where two ranks never move less in two steps.
constexpr int64_t kOneShotBytesInMemory = 1 << 17;
// Between two ranks both send as much, and full width may go either way: see algorithm_for.
constexpr int64_t kOneShotBytesOfTwo = 1 << 22;

constexpr std::array kWires{std::pair("none", Wire::kNone), std::pair("fp16", Wire::kFloat16),
                            std::pair("bf16", Wire::kBFloat16), std::pair("int8", Wire::kInt8),
                            std::pair("int4", Wire::kInt4)};
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
    case Wire::kInt4:
      return DType::kInt4;
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

CompressionTable::CompressionTable(std::vector<Row> rows) : rows_(std::move(rows)) {
  TORCH_CHECK_VALUE(!rows_.empty(), "rows: expected at least one");
  for (const auto& [numel, compression] : rows_) {
    const bool is_last = &compression == &rows_.back().second;
    description_ += (description_.empty() ? "compression " : " or ") + describe(compression) +
                    (is_last ? "" : c10::str(" up to ", numel, " values"));
  }
}

const Compression& CompressionTable::at(int64_t numel) const {
  const auto row = std::find_if(rows_.begin(), rows_.end() - 1, [&](const Row& each) { return numel <= each.first; });
  return row->second;
}

bool CompressionTable::is_lossless() const {
  return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.second.wire == Wire::kNone; });
}

}  // namespace fastsync
