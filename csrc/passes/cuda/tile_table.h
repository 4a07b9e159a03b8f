// A launch's segments are cut into tiles of at most one size, which its blocks share out. A tile is a segment, too.
// This is pure arithmetic, so that tests on a CPU cover it.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync::cuda {

// Returns the tile that begins with this value of the segment.
FASTSYNC_HOST_DEVICE Segment tile_at(const Segment& segment, int64_t begin, int64_t tile_size, int64_t grad_bytes,
                                     int64_t operand_bytes) {
  const auto from_begin = [begin](void* memory, int64_t bytes) -> void* {
    return memory == nullptr ? nullptr : static_cast<char*>(memory) + begin * bytes;
  };
  const int64_t left = segment.numel - begin;
  return {from_begin(segment.data, grad_bytes), left < tile_size ? left : tile_size, segment.offset + begin,
          from_begin(segment.operand, operand_bytes)};
}

// The tiles of a segment share its factor.
inline std::vector<Segment> cut_into_tiles(const Segment* segments, int64_t num_segments, int64_t tile_size, DType grad,
                                           bool have_factors) {
  const int64_t grad_bytes = unit_of(grad).bytes;
  const int64_t operand_bytes = have_factors ? 0 : grad == DType::kFloat64 ? sizeof(double) : sizeof(float);
  std::vector<Segment> tiles;
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    for (int64_t begin = 0; begin < segment->numel; begin += tile_size) {
      tiles.push_back(tile_at(*segment, begin, tile_size, grad_bytes, operand_bytes));
    }
  }
  return tiles;
}

// The tiles of one launch. The table is a kernel's argument. Many segments are cut by the host, and lie in the
// device's memory. Few are an argument themselves, and a kernel cuts them. So the buckets of a small model, and large
// gradients by themselves, need nothing in the device's memory.
constexpr int kFewSegments = 12;

struct TileTable {
  const Segment* on_device;  // all tiles; null if there are few segments
  int64_t num_tiles;
  Segment few[kFewSegments];
  int64_t first_tile[kFewSegments];  // the index of each segment's first tile; beyond all tiles if there is none

  static TileTable of_many(const Segment* on_device, int64_t num_tiles) { return {on_device, num_tiles, {}, {}}; }

  static TileTable of_few(const Segment* segments, int64_t num_segments, int64_t tile_size) {
    TileTable table{};
    for (int64_t i = 0; i < kFewSegments; ++i) {
      table.first_tile[i] = i < num_segments ? table.num_tiles : std::numeric_limits<int64_t>::max();
      if (i < num_segments) {
        table.few[i] = segments[i];
        table.num_tiles += (segments[i].numel + tile_size - 1) / tile_size;
      }
    }
    return table;
  }

  // Returns the tile at an index. If there are few segments, its segment is the last one whose first tile is not
  // beyond the index. All are compared, because a search would wait for one after the other.
  FASTSYNC_HOST_DEVICE Segment at(int64_t index, int64_t tile_size, int64_t grad_bytes, int64_t operand_bytes) const {
    if (on_device != nullptr) {
      return on_device[index];
    }
    int segment = 0;
    for (int i = 1; i < kFewSegments; ++i) {
      segment += first_tile[i] <= index ? 1 : 0;
    }
    return tile_at(few[segment], (index - first_tile[segment]) * tile_size, tile_size, grad_bytes, operand_bytes);
  }
};

}  // namespace fastsync::cuda
