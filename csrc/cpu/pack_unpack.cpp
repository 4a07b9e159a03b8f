// pack, unpack and measure on a CPU: chunks shared out over at::parallel_for, rows of sixteen inside a chunk.
#include "../pack_unpack.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../chunk_table.h"
#include "rows.h"

namespace fastsync::cpu {
namespace {

constexpr int64_t kChunkSize = 32768;

// ATEN_CPU_CAPABILITY=default, which makes torch itself do without vector instructions, does so here too.
[[maybe_unused]] bool has_avx2_rows() {
#if FASTSYNC_HAS_AVX2_ROWS
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && at::get_cpu_capability() != "DEFAULT";
  return has;
#else
  return false;
#endif
}

// The sum of squares in double, one sum per column, so that the result depends neither on the number of threads nor on
// the instruction set. Blocks whose squares are safe in float come in summed; the others value by value.
struct Tally {
  double columns[kRow] = {};
  double largest = 0.0;
  int64_t num_nonfinite = 0;

  template <class C>
  void add_value(C value, int column) {
    const auto wide = static_cast<double>(value);
    columns[column] += wide * wide;
    if (is_finite(value)) {
      largest = std::max(largest, magnitude(wide));
    } else {
      num_nonfinite += 1;
    }
  }

  template <class G>
  void add_values(const G* gradient, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) {
      add_value(decode(gradient[i]), static_cast<int>(i % kRow));
    }
  }

  template <class G>
  void add_block(const BlockSquares& squares, const G* gradient, int64_t numel) {
    constexpr uint32_t kSmallestSafe = (127U - 40U)
                                       << 23;              // 2^-40: what its square hides from a float sum is too small
    constexpr uint32_t kLargestSafe = (127U + 60U) << 23;  // 2^60: sixteen squares stay below float's largest
    if (squares.largest_bits == 0) {
      return;
    }
    if (squares.largest_bits < kSmallestSafe || squares.largest_bits > kLargestSafe) {
      add_values(gradient, numel);
      return;
    }
    for (int j = 0; j < kRow; ++j) {
      columns[j] += static_cast<double>(squares.columns[j]);
    }
    largest = std::max(largest, static_cast<double>(float_from_bits(squares.largest_bits)));
  }

  void add(const Tally& other) {
    for (int j = 0; j < kRow; ++j) {
      columns[j] += other.columns[j];
    }
    largest = std::max(largest, other.largest);
    num_nonfinite += other.num_nonfinite;
  }

  void write_to(double* stats) const {
    double sum = 0.0;
    for (const double column : columns) {
      sum += column;
    }
    stats[kSumOfSquares] = sum;
    stats[kNumNonfinite] = static_cast<double>(num_nonfinite);
    stats[kMaxMagnitude] = largest;
  }
};

template <class G, class W>
int64_t pack_chunk(const G* gradient, W* wire, int64_t numel, Compute<G> multiplier, Compute<G> limit) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (!std::is_same_v<G, double>) {
    if (has_avx2_rows()) {
      return avx2::pack_rows(gradient, wire, numel, multiplier, limit);
    }
  }
#endif
  return portable::pack_rows(gradient, wire, numel, multiplier, limit);
}

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
Tally unpack_chunk(const W* wire, G* gradient, int64_t numel, Compute<G> multiplier) {
  Tally tally;
  if constexpr (std::is_same_v<G, double>) {
    for (int64_t i = 0; i < numel; ++i) {
      gradient[i] = decode_to<G>(wire[i], multiplier);
    }
    tally.add_values(gradient, numel);
  } else {
    int64_t i = 0;
    for (; i + kBlock <= numel; i += kBlock) {
      BlockSquares squares{};
      unpack_one_block(wire + i, gradient + i, multiplier, squares);
      tally.add_block(squares, gradient + i, kBlock);
    }
    if (i < numel) {
      const PaddedBlock<W> rest(wire + i, numel - i);
      G unpacked[kBlock];
      BlockSquares squares{};
      unpack_one_block(rest.values, unpacked, multiplier, squares);
      std::memcpy(gradient + i, unpacked, (numel - i) * sizeof(G));
      tally.add_block(squares, gradient + i, numel - i);
    }
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

// Runs work(segment, chunk) -> Partial for every chunk and returns the partials in the chunks' order.
template <class Partial, class Work>
std::vector<Partial> for_each_chunk(const Segment* segments, int64_t num_segments, const Work& work) {
  std::vector<int64_t> first_chunk(num_segments + 1);
  number_chunks(segments, num_segments, kChunkSize, first_chunk.data());
  std::vector<Partial> partials(first_chunk[num_segments]);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = find_chunk(segments, first_chunk.data(), num_segments, kChunkSize, index);
      partials[index] = work(segments[chunk.segment], chunk);
    }
  };
  int64_t numel = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    numel += segments[s].numel;
  }
  if (numel <= kChunkSize) {  // waking a thread costs more than this little work
    run(0, first_chunk[num_segments]);
  } else {
    at::parallel_for(0, first_chunk[num_segments], 1, run);
  }
  return partials;
}

template <class G>
G* chunk_data(const Segment& segment, const Chunk& chunk) {
  return static_cast<G*>(segment.data) + chunk.begin;
}

void write_total(const std::vector<Tally>& tallies, double* stats) {
  Tally total;
  for (const Tally& tally : tallies) {
    total.add(tally);
  }
  total.write_to(stats);
}

template <class G, class W>
void pack_typed(const PackArgs& args) {
  const auto scale = static_cast<Compute<G>>(args.bucket_scale != nullptr ? *args.bucket_scale : 1.0F);
  const Compute<G> multiplier = static_cast<Compute<G>>(args.multiplier) * scale;
  const auto limit = static_cast<Compute<G>>(args.limit);
  const auto counts =
      for_each_chunk<int64_t>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        W* wire = static_cast<W*>(args.wire) + segment.offset + chunk.begin;
        return pack_chunk(chunk_data<const G>(segment, chunk), wire, chunk.length, multiplier, limit);
      });
  int64_t num_saturated = 0;
  for (const int64_t count : counts) {
    num_saturated += count;
  }
  args.stats[kNumSaturated] = static_cast<double>(num_saturated);
}

template <class G, class W>
void unpack_typed(const UnpackArgs& args) {
  const auto scale = static_cast<Compute<G>>(args.bucket_scale != nullptr ? *args.bucket_scale : 1.0F);
  const Compute<G> multiplier = Compute<G>(1) / scale;
  const auto tallies =
      for_each_chunk<Tally>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        const W* wire = static_cast<const W*>(args.wire) + segment.offset + chunk.begin;
        return unpack_chunk(wire, chunk_data<G>(segment, chunk), chunk.length, multiplier);
      });
  write_total(tallies, args.stats);
  if (args.bucket_scale != nullptr) {
    *args.bucket_scale = next_bucket_scale(*args.bucket_scale, args.stats[kMaxMagnitude]);
  }
}

template <class G>
void measure_typed(const MeasureArgs& args) {
  const auto tallies =
      for_each_chunk<Tally>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        return measure_chunk(chunk_data<const G>(segment, chunk), chunk.length);
      });
  write_total(tallies, args.stats);
}

}  // namespace

void pack(const PackArgs& args) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { pack_typed<decltype(grad), decltype(wire)>(args); });
}

void unpack(const UnpackArgs& args) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { unpack_typed<decltype(grad), decltype(wire)>(args); });
}

void measure(const MeasureArgs& args) {
  dispatch_grad(args.grad_dtype, [&](auto grad) { measure_typed<decltype(grad)>(args); });
}

}  // namespace fastsync::cpu
