// How the segments of one launch are cut into chunks of at most one size, which its blocks share out evenly. Pure
// arithmetic, so that tests on a CPU cover it.
#pragma once

#include <cstdint>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

struct Chunk {
  int64_t segment;
  int64_t begin;   // in elements, within the segment
  int64_t length;  // at most the chunk size
};

template <int kMaxSegments>
struct ChunkTable {
  int64_t num_segments;
  Segment segments[kMaxSegments];
  int64_t first_chunk[kMaxSegments + 1];  // of each segment; then the number of all chunks

  // Empty segments have no chunk.
  void add(const Segment& segment, int64_t chunk_size) {
    segments[num_segments] = segment;
    first_chunk[num_segments + 1] = first_chunk[num_segments] + (segment.numel + chunk_size - 1) / chunk_size;
    num_segments += 1;
  }

  FASTSYNC_HOST_DEVICE int64_t num_chunks() const { return first_chunk[num_segments]; }

  // Of the last segment whose first chunk is not beyond the index.
  FASTSYNC_HOST_DEVICE Chunk find(int64_t index, int64_t chunk_size) const {
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
    const int64_t begin = (index - first_chunk[low]) * chunk_size;
    const int64_t left = segments[low].numel - begin;
    return {low, begin, left < chunk_size ? left : chunk_size};
  }
};

}  // namespace fastsync::cuda
