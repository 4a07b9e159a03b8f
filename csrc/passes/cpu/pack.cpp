// Gradients to wire, and wires to wire, on a CPU.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "passes/cpu/chunks.h"
#include "passes/cpu/rows.h"
#include "passes/cpu/stages.h"
#include "passes/pack_unpack.h"

namespace fastsync::cpu {
namespace {

template <class G, class W>
int64_t pack_rows(const G* gradient, W* wire, int64_t numel, const Scaling<Compute<G>>& scaling) {
#if FASTSYNC_HAS_AVX2_ROWS
  if constexpr (!std::is_same_v<G, double>) {
    if (has_avx2_rows()) {
      return avx2::pack_rows(gradient, wire, numel, scaling.multiplier, scaling.limit);
    }
  }
#endif
  return portable::pack_rows(gradient, wire, numel, scaling.multiplier, scaling.limit);
}

template <class W, class C>
Scaling<C> scaling_of(C multiplier, double limit) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  return {multiplier, static_cast<C>(std::min<double>(limit, std::is_same_v<W, Int8Block> ? kInt8Limit : kNoLimit))};
}

// The values to be sent: the gradient's own where there is nothing to convert, to multiply, to take away or to add,
// gathered else.
template <class G, class C>
const C* gather(const G* gradient, const G* subtrahend, const C* residual, C weight, int64_t numel, C* gathered) {
  if constexpr (std::is_same_v<G, C>) {
    if (subtrahend == nullptr && residual == nullptr && weight == C(1)) {
      return gradient;
    }
  }
  if (weight == C(0)) {
    std::fill_n(gathered, numel, C(0));
  } else if (subtrahend != nullptr) {
    subtract(gradient, subtrahend, numel, gathered);
  } else {
    convert(gradient, numel, gathered);
  }
  if (weight != C(0) && weight != C(1)) {
    std::transform(gathered, gathered + numel, gathered, [weight](C value) { return value * weight; });
  }
  if (residual != nullptr) {
    add_residual(residual, C(1), numel, gathered);
  }
  return gathered;
}

template <class W, class G>
int64_t pack_chunk(const G* gradient, const G* subtrahend, Compute<G>* residual, int64_t numel,
                   Scaling<Compute<G>> scaling, Compute<G> weight, Rounding rounding, void* wire, int64_t first) {
  using C = Compute<G>;
  if (residual == nullptr && weight != C(0)) {
    scaling.multiplier = scaling.multiplier * weight;
    weight = C(1);
  }
  if constexpr (!std::is_same_v<W, Int8Block>) {
    if (subtrahend == nullptr && residual == nullptr && weight == C(1)) {
      return pack_rows(gradient, element_of<W>(wire, first), numel, scaling);
    }
  }
  int64_t num_saturated = 0;
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t length = std::min(kBlock, numel - begin);
    W* const encoded = element_of<W>(wire, first + begin);
    C gathered[kBlock];
    const C* const values = gather<G, C>(gradient + begin, from_or_null(subtrahend, begin),
                                         from_or_null(residual, begin), weight, length, gathered);
    num_saturated += encode_values(values, length, scaling, rounding, first + begin, encoded);
    if (residual != nullptr) {
      keep_loss(values, length, encoded, C(1) / scaling.multiplier, C(1), residual + begin);
    }
  }
  return num_saturated;
}

// What lies behind a segment's last chunk, which on int8 is the rest of its last block.
template <class W>
void fill_gap(const Segment& segment, const Chunk& chunk, const PackArgs& args) {
  if constexpr (!std::is_same_v<W, Int8Block>) {
    if (chunk.begin + chunk.length == segment.numel) {
      std::fill_n(element_of<W>(args.wire, segment.offset + segment.numel), gap_behind(segment, args.alignment), W{});
    }
  }
}

template <class G, class W>
void pack_typed(const PackArgs& args) {
  using C = Compute<G>;
  const auto scale = static_cast<C>(args.bucket_scale != nullptr ? *args.bucket_scale : 1.0F);
  const auto scaling = scaling_of<W>(static_cast<C>(args.multiplier) * scale, args.limit);
  const auto weight = static_cast<C>(args.weight != nullptr ? *args.weight : 1.0);
  const auto counts =
      for_each_chunk<int64_t>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        fill_gap<W>(segment, chunk, args);
        return pack_chunk<W>(chunk_data<const G>(segment, chunk),
                             from_or_null(static_cast<const G*>(segment.subtrahend), chunk.begin),
                             from_or_null(static_cast<C*>(segment.residual), chunk.begin), chunk.length, scaling,
                             weight, args.rounding, args.wire, segment.offset + chunk.begin);
      });
  double num_saturated = args.turn.is_first ? 0.0 : args.stats[kNumSaturated];
  for (const int64_t count : counts) {
    num_saturated += static_cast<double>(count);
  }
  args.stats[kNumSaturated] = num_saturated;
}

template <class C, class W, class Out>
void reduce_typed(const ReduceArgs& args) {
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const auto multiplier = static_cast<C>(args.multiplier);
  const auto scaling = scaling_of<Out>(C(1), args.limit);
  const auto scale = static_cast<C>(args.bucket_scale != nullptr ? *args.bucket_scale : 1.0F);
  auto* residual = static_cast<C*>(args.residual);
  const auto reduce_block = [&](int64_t first, int64_t length) {
    Out* const encoded = element_of<Out>(args.out, first);
    C values[kBlock] = {};  // for the compiler, which does not see that there is a wire
    sum_wires<W>(wires, first, length, multiplier, values);
    if (residual != nullptr) {
      add_residual(residual + first, scale, length, values);
    }
    encode_values(values, length, scaling, args.rounding, first, encoded);
    if (residual != nullptr) {
      keep_loss(values, length, encoded, C(1), C(1) / scale, residual + first);
    }
  };
  const Segment all{nullptr, args.numel, 0};
  for_each_chunk<char>(&all, 1, [&](const Segment&, const Chunk& chunk) {
    for (int64_t begin = 0; begin < chunk.length; begin += kBlock) {
      reduce_block(chunk.begin + begin, std::min(kBlock, chunk.length - begin));
    }
    return char{};
  });
}

}  // namespace

void pack(const PackArgs& args) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { pack_typed<decltype(grad), decltype(wire)>(args); });
}

void reduce(const ReduceArgs& args) {
  dispatch_reduce(args.grad_dtype, args.wire_dtype, args.out_dtype, [&](auto compute, auto wire, auto out) {
    reduce_typed<decltype(compute), decltype(wire), decltype(out)>(args);
  });
}

}  // namespace fastsync::cpu
