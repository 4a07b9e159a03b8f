// Wires to gradients, and the statistics of gradients, on a CPU.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "passes/cpu/chunks.h"
#include "passes/cpu/rows.h"
#include "passes/cpu/stages.h"
#include "passes/cpu/tally.h"
#include "passes/pack_unpack.h"

namespace fastsync::cpu {
namespace {

template <class W, class G>
void unpack_one_block(const W* wire, G* gradient, float multiplier, BlockSquares& squares) {
#if FASTSYNC_HAS_AVX2_ROWS
  if (has_avx2_rows()) {
    avx2::unpack_block(wire, gradient, multiplier, squares);
    constexpr uint32_t kInfinity = 0x7F800000U;
    if (!kMayHoldBeyond<W, G> || squares.largest_bits < kInfinity) {
      return;
    }
    squares = {};
  }
#endif
  portable::unpack_block(wire, gradient, multiplier, squares);
}

template <class G>
void measure_one_block(const G* gradient, BlockSquares& squares) {
#if FASTSYNC_HAS_AVX2_ROWS
  if (has_avx2_rows()) {
    avx2::measure_block(gradient, squares);
    return;
  }
#endif
  portable::measure_block(gradient, squares);
}

// What is left after the last whole block, padded with zeros, which count for nothing, to be a block as well.
template <class T>
struct PaddedBlock {
  T values[kBlock] = {};
  PaddedBlock(const T* source, int64_t numel) { std::memcpy(values, source, numel * sizeof(T)); }
};

template <class W, class G>
int64_t count_saturated(const W* values, int64_t numel, Compute<G> multiplier) {
  int64_t count = 0;
  for (int64_t i = 0; i < numel; ++i) {
    bool saturated;
    decode_to<G>(values[i], multiplier, saturated);
    count += saturated;
  }
  return count;
}

// At most a block of values, in the wire's own type or summed, to gradients.
template <class W, class G>
void unpack_values(const W* values, G* gradient, int64_t numel, Compute<G> multiplier, Tally& tally) {
  BlockSquares squares{};
  if constexpr (std::is_same_v<G, double>) {
    for (int64_t i = 0; i < numel; ++i) {
      bool saturated;
      gradient[i] = decode_to<G>(values[i], multiplier, saturated);
      tally.num_saturated += saturated;
    }
    tally.add_values(gradient, numel);
  } else if (numel == kBlock) {
    unpack_one_block(values, gradient, multiplier, squares);
    tally.add_block(squares, gradient, numel);
  } else {
    const PaddedBlock<W> rest(values, numel);
    G unpacked[kBlock];
    unpack_one_block(rest.values, unpacked, multiplier, squares);
    std::memcpy(gradient, unpacked, numel * sizeof(G));
    tally.add_block(squares, gradient, numel);
  }
  if constexpr (!std::is_same_v<G, double>) {
    if (squares.largest_bits >= float_bits(kLargest<G>)) {  // else nothing can have been clamped
      tally.num_saturated += count_saturated<W, G>(values, numel, multiplier);
    }
  }
}

const Sum* as_sums(const float* sums) { return reinterpret_cast<const Sum*>(sums); }
const double* as_sums(const double* sums) { return sums; }

template <class W, class G>
Tally unpack_chunk(const Wires& wires, int64_t first, G* gradient, int64_t numel, Compute<G> multiplier,
                   Compute<G> inverse_scale) {
  using C = Compute<G>;
  Tally tally;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    if constexpr (!std::is_same_v<W, Int8Block>) {
      if (wires.num == 1 && multiplier == C(1)) {
        unpack_values(wires.at<W>(0, first + begin), gradient + begin, length, inverse_scale, tally);
        continue;
      }
    }
    C sums[kBlock];
    sum_wires<W>(wires, first + begin, length, multiplier, sums);
    unpack_values(as_sums(sums), gradient + begin, length, inverse_scale, tally);
  }
  return tally;
}

template <class G>
Tally measure_chunk(const G* gradient, int64_t numel) {
  Tally tally;
  if constexpr (std::is_same_v<G, double>) {
    tally.add_values(gradient, numel);
  } else {
    int64_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) {
      BlockSquares squares{};
      measure_one_block(gradient + i, squares);
      tally.add_block(squares, gradient + i, kBlock);
    }
    if (i < numel) {
      const PaddedBlock<G> rest(gradient + i, numel - i);
      BlockSquares squares{};
      measure_one_block(rest.values, squares);
      tally.add_block(squares, gradient + i, numel - i);
    }
  }
  return tally;
}

template <class G, class W>
void unpack_typed(const UnpackArgs& args) {
  using C = Compute<G>;
  const auto scale = static_cast<C>(args.bucket_scale != nullptr ? *args.bucket_scale : 1.0F);
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const auto tallies =
      for_each_chunk<Tally>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        return unpack_chunk<W>(wires, segment.offset + chunk.begin, chunk_data<G>(segment, chunk), chunk.length,
                               static_cast<C>(args.multiplier), C(1) / scale);
      });
  total_of(tallies).write_to(args.stats, args.turn.is_first);
  if (args.turn.is_last) {
    move_on(args.bucket_scale, args.step, args.stats, args.scale_share);
  }
}

template <class G>
void measure_typed(const MeasureArgs& args) {
  const auto tallies =
      for_each_chunk<Tally>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        return measure_chunk(chunk_data<const G>(segment, chunk), chunk.length);
      });
  total_of(tallies).write_to(args.stats, true);
}

}  // namespace

void unpack(const UnpackArgs& args) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { unpack_typed<decltype(grad), decltype(wire)>(args); });
}

void measure(const MeasureArgs& args) {
  dispatch_grad(args.grad_dtype, [&](auto grad) { measure_typed<decltype(grad)>(args); });
}

}  // namespace fastsync::cpu
