// The loops of every instruction set take these: tiles of segments, and wires.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

#include "passes/cpu/tally.h"
#include "passes/pack_unpack.h"

#define FASTSYNC_INLINE __attribute__((always_inline)) inline

namespace fastsync::cpu {

// The wires of several ranks, which hold the same elements.
struct Wires {
  const void* first;
  int64_t num;
  int64_t stride_bytes;
  bool by_tree = false;  // see Note [Sums by a tree]
  int64_t own = -1;      // the wire whose values are elsewhere, see UnpackArgs::own_wire
  const void* own_first = nullptr;

  template <class W>
  const W* at(int64_t wire, int64_t index) const {
    if (wire == own) {
      return unit_at<W>(own_first, index);
    }
    return unit_at<W>(static_cast<const char*>(first) + wire * stride_bytes, index);
  }
};

// A range of a segment, which one thread works on.
struct Tile {
  const Segment& segment;
  int64_t begin;  // index of its first value, in the segment
  int64_t length;

  template <class G>
  G* data() const {
    return static_cast<G*>(segment.data) + begin;
  }
  template <class C>
  C* residual(int64_t shift = 0) const {
    const int64_t index = begin + shift / static_cast<int64_t>(sizeof(C));
    return segment.residuals() == nullptr ? nullptr : static_cast<C*>(segment.residuals()) + index;
  }
  template <class C>
  C factor() const {
    return static_cast<C>(segment.factor() == nullptr ? 1.0 : *segment.factor());
  }
  int64_t offset() const { return segment.offset + begin; }  // where it begins on the wire, in values
};

// Calls `work` for every tile of the segments, and adds up what it returns, in the tiles' order. It is not a
// template, because there are a hundred kinds of work.
Tally for_each_tile(const Segment* segments, int64_t num_segments, c10::function_ref<Tally(const Tile&)> work);

}  // namespace fastsync::cpu
