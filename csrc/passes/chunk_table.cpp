#include "passes/chunk_table.h"

namespace fastsync {

std::vector<SegmentRange> split_into_launches(const Segment* segments, int64_t num_segments, int64_t capacity) {
  std::vector<SegmentRange> ranges;
  int64_t begin = 0;
  int64_t num_taken = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    if (segments[s].numel == 0) {
      continue;
    }
    if (num_taken == capacity) {
      ranges.emplace_back(begin, s);
      begin = s;
      num_taken = 0;
    }
    num_taken += 1;
  }
  ranges.emplace_back(begin, num_segments);
  return ranges;
}

namespace {

std::vector<Segment> segments_of(const std::vector<int64_t>& numels) {
  std::vector<Segment> segments;
  for (const int64_t numel : numels) {
    segments.push_back({nullptr, numel, 0});
  }
  return segments;
}

}  // namespace

std::vector<std::tuple<int64_t, int64_t, int64_t>> chunk_table(const std::vector<int64_t>& numels, int64_t chunk_size) {
  const std::vector<Segment> segments = segments_of(numels);
  const auto num_segments = static_cast<int64_t>(segments.size());
  std::vector<int64_t> first_chunk(num_segments + 1);
  number_chunks(segments.data(), num_segments, chunk_size, first_chunk.data());
  std::vector<std::tuple<int64_t, int64_t, int64_t>> table;
  for (int64_t index = 0; index < first_chunk.back(); ++index) {
    const Chunk chunk = find_chunk(segments.data(), first_chunk.data(), num_segments, chunk_size, index);
    table.emplace_back(chunk.segment, chunk.begin, chunk.length);
  }
  return table;
}

std::vector<SegmentRange> launch_ranges(const std::vector<int64_t>& numels, int64_t capacity) {
  const std::vector<Segment> segments = segments_of(numels);
  return split_into_launches(segments.data(), static_cast<int64_t>(segments.size()), capacity);
}

}  // namespace fastsync
