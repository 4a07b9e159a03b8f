// A launch's segments are cut into chunks of at most one size, which its blocks share out. A chunk is a segment, too.
// This is pure arithmetic, so that tests on a CPU cover it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

// Returns the chunk that begins with this value of the segment.
FASTSYNC_HOST_DEVICE Segment chunk_at(const Segment& segment, int64_t begin, int64_t chunk_size, int64_t grad_bytes,
                                      int64_t residual_bytes) {
  const auto from_begin = [begin](void* memory, int64_t bytes) -> void* {
    return memory == nullptr ? nullptr : static_cast<char*>(memory) + begin * bytes;
  };
  const int64_t left = segment.numel - begin;
  return {from_begin(segment.data, grad_bytes), left < chunk_size ? left : chunk_size, segment.offset + begin,
          from_begin(segment.residual, residual_bytes)};
}

inline std::vector<Segment> cut_into_chunks(const Segment* segments, int64_t num_segments, int64_t chunk_size,
                                            DType grad) {
  const int64_t grad_bytes = unit_of(grad).bytes;
  const int64_t residual_bytes = grad == DType::kFloat64 ? sizeof(double) : sizeof(float);
  std::vector<Segment> chunks;
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    for (int64_t begin = 0; begin < segment->numel; begin += chunk_size) {
      chunks.push_back(chunk_at(*segment, begin, chunk_size, grad_bytes, residual_bytes));
    }
  }
  return chunks;
}

// The chunks of one launch. The table is a kernel's argument. Many segments are cut by the host, and lie in the
// device's memory. Few are an argument themselves, and a kernel cuts them. So the buckets of a small model, and large
// gradients by themselves, need nothing in the device's memory.
constexpr int kFewSegments = 12;

struct ChunkTable {
  const Segment* on_device;  // all chunks; null if there are few segments
  int64_t num_chunks;
  Segment few[kFewSegments];
  int64_t first_chunk[kFewSegments];  // the index of each segment's first chunk; beyond all chunks if there is none

  static ChunkTable of_many(const Segment* on_device, int64_t num_chunks) { return {on_device, num_chunks, {}, {}}; }

  static ChunkTable of_few(const Segment* segments, int64_t num_segments, int64_t chunk_size) {
    ChunkTable table{};
    for (int64_t i = 0; i < kFewSegments; ++i) {
      table.first_chunk[i] = i < num_segments ? table.num_chunks : std::numeric_limits<int64_t>::max();
      if (i < num_segments) {
        table.few[i] = segments[i];
        table.num_chunks += (segments[i].numel + chunk_size - 1) / chunk_size;
      }
    }
    return table;
  }

  // Returns the chunk at an index. If there are few segments, its segment is the last one whose first chunk is not
  // beyond the index. All are compared, because a search would wait for one after the other.
  FASTSYNC_HOST_DEVICE Segment at(int64_t index, int64_t chunk_size, int64_t grad_bytes, int64_t residual_bytes) const {
    if (on_device != nullptr) {
      return on_device[index];
    }
    int segment = 0;
    for (int i = 1; i < kFewSegments; ++i) {
      segment += first_chunk[i] <= index ? 1 : 0;
    }
    return chunk_at(few[segment], (index - first_chunk[segment]) * chunk_size, chunk_size, grad_bytes, residual_bytes);
  }
};

}  // namespace fastsync::cuda
