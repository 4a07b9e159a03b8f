// How a list of segments of any lengths is cut into chunks of at most one size, so that one launch (or one
// parallel_for) serves them all evenly. Pure arithmetic, the same for threads and for blocks.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "passes/pack_unpack.h"
#include "passes/wire_format.h"

namespace fastsync {

struct Chunk {
  int64_t segment;
  int64_t begin;   // in elements, within the segment
  int64_t length;  // at most the chunk size
};

// Fills first_chunk[0] to first_chunk[num_segments]: first_chunk[s] is the number of chunks before segment s, the last
// one the number in all. Empty segments have none.
inline void number_chunks(const Segment* segments, int64_t num_segments, int64_t chunk_size, int64_t* first_chunk) {
  first_chunk[0] = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    first_chunk[s + 1] = first_chunk[s] + (segments[s].numel + chunk_size - 1) / chunk_size;
  }
}

// The segment that holds chunk number index: the last one whose first_chunk is not beyond it.
FASTSYNC_HOST_DEVICE int64_t find_segment(const int64_t* first_chunk, int64_t num_segments, int64_t index) {
  int64_t low = 0;
  int64_t high = num_segments;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (first_chunk[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

FASTSYNC_HOST_DEVICE Chunk find_chunk(const Segment* segments, const int64_t* first_chunk, int64_t num_segments,
                                      int64_t chunk_size, int64_t index) {
  const int64_t s = find_segment(first_chunk, num_segments, index);
  const int64_t begin = (index - first_chunk[s]) * chunk_size;
  const int64_t left = segments[s].numel - begin;
  return {s, begin, left < chunk_size ? left : chunk_size};
}

// Segments [first, second) for each launch of a call: as few launches as do when one takes at most capacity non-empty
// segments, and always one, because statistics are written even where there is nothing to read.
using SegmentRange = std::pair<int64_t, int64_t>;
inline std::vector<SegmentRange> split_into_launches(const Segment* segments, int64_t num_segments, int64_t capacity) {
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

}  // namespace fastsync
