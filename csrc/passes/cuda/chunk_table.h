// A chunk table cuts the segments of one launch into chunks of at most one size. The launch's blocks share them out
// evenly. It is pure arithmetic, so that tests on a CPU cover it.
#pragma once

#include <cstdint>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

struct Chunk {
  int64_t segment;
  int64_t begin;   // index of its first value, in the segment
  int64_t length;  // at most the chunk size
};

template <int kMaxSegments>
struct ChunkTable {
  int64_t num_segments;
  Segment segments[kMaxSegments + 1];     // the segments, followed by an empty one
  int64_t first_chunk[kMaxSegments + 1];  // index of each segment's first chunk, followed by the number of all chunks

  // The segment must not be empty.
  void add(const Segment& segment, int64_t chunk_size) {
    segments[num_segments] = segment;
    first_chunk[num_segments + 1] = first_chunk[num_segments] + (segment.numel + chunk_size - 1) / chunk_size;
    num_segments += 1;
  }

  FASTSYNC_HOST_DEVICE int64_t num_chunks() const { return first_chunk[num_segments]; }

  // Returns the chunk at an index. Its segment is the last one whose first chunk is not beyond the index.
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
    return chunk_at(low, (index - first_chunk[low]) * chunk_size, chunk_size);
  }

  // Returns the chunk after this one; after the last one, a chunk of length 0.
  FASTSYNC_HOST_DEVICE Chunk next(const Chunk& chunk, int64_t chunk_size) const {
    const bool is_last_of_segment = chunk.begin + chunk_size >= segments[chunk.segment].numel;
    return is_last_of_segment ? chunk_at(chunk.segment + 1, 0, chunk_size)
                              : chunk_at(chunk.segment, chunk.begin + chunk_size, chunk_size);
  }

 private:
  FASTSYNC_HOST_DEVICE Chunk chunk_at(int64_t segment, int64_t begin, int64_t chunk_size) const {
    const int64_t left = segments[segment].numel - begin;
    return {segment, begin, left < chunk_size ? left : chunk_size};
  }
};

}  // namespace fastsync::cuda
