// The passes of pack_unpack.h for one instruction set: they choose types, and call the loops for each tile.
#pragma once

#include "passes/cpu/instruction_sets.h"
#include "passes/cpu/loops.h"

namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS {
namespace {

template <class C>
C value_or_one(const float* scale) {
  return static_cast<C>(scale != nullptr ? *scale : 1.0F);
}

}  // namespace

void pack(const PackArgs& args, const Scratch& /*scratch*/, void* /*stream*/) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto unit) {
    using G = decltype(grad);
    using W = decltype(unit);
    using C = Compute<G>;
    const auto multiplier = static_cast<C>(args.multiplier) * value_or_one<C>(args.bucket_scale);
    const auto weight = static_cast<C>(args.weight != nullptr ? *args.weight : 1.0);
    const Tally tally = for_each_tile(args.segments, args.num_segments, [&](const Tile& tile) {
      return pack_tile<W>(tile.data<const G>(), tile.residual<const C>(), tile.residual<C>(args.residual_shift),
                          tile.length, multiplier, limit_on<W, C>(args.limit), weight, args.wire, tile.offset());
    });
    if constexpr (!kIsBlock<W>) {
      for (const Segment* segment = args.segments; segment < args.segments + args.num_segments; ++segment) {
        W* const end = unit_at<W>(args.wire, segment->offset + segment->numel);
        std::fill_n(end, gap_behind(*segment, args.gap_alignment), W{});
      }
    }
    args.stats[kNumSaturated] =
        (args.position.is_first ? 0.0 : args.stats[kNumSaturated]) + static_cast<double>(tally.num_saturated);
  });
}

void unpack(const UnpackArgs& args, const Scratch& /*scratch*/, void* /*stream*/) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto unit) {
    using G = decltype(grad);
    using W = decltype(unit);
    using C = Compute<G>;
    const C inverse_scale = C(1) / value_or_one<C>(args.bucket_scale);
    const bool has_own = args.own_wire >= 0;
    const Tally tally = for_each_tile(args.segments, args.num_segments, [&](const Tile& tile) {
      Wires wires{args.wire, args.num_wires, args.stride_bytes, args.by_tree, args.own_wire};
      if constexpr (std::is_same_v<G, W>) {
        wires.own_first = has_own ? static_cast<const W*>(tile.segment.own_values()) - tile.segment.offset : nullptr;
      }
      const C factor = has_own ? C(1) : tile.factor<C>();
      return unpack_tile<W>(wires, tile.offset(), tile.data<G>(), tile.length, static_cast<C>(args.multiplier),
                            inverse_scale * factor);
    });
    tally.write_to(args.stats, args.position.is_first);
    if (args.position.is_last && args.bucket_scale != nullptr) {
      *args.bucket_scale = next_bucket_scale(*args.bucket_scale, args.stats[kMaxMagnitude] * args.scale_share);
    }
  });
}

void reduce(const ReduceArgs& args, const Scratch& /*scratch*/, void* /*stream*/) {
  dispatch_reduce(args.grad_dtype, args.wire_dtype, args.out_dtype, [&](auto compute, auto unit, auto out) {
    using C = decltype(compute);
    using W = decltype(unit);
    using Out = decltype(out);
    const Wires wires{args.wire, args.num_wires, args.stride_bytes, args.by_tree};
    const C scale = value_or_one<C>(args.bucket_scale) * static_cast<C>(args.residual_share);
    const Segment all{nullptr, args.numel, 0, args.residual};
    for_each_tile(&all, 1, [&](const Tile& tile) {
      return reduce_tile<C, W, Out>(wires, tile.begin, tile.length, static_cast<C>(args.multiplier),
                                    limit_on<Out, C>(args.limit), scale, tile.residual<C>(), args.out);
    });
  });
}

}  // namespace fastsync::cpu::FASTSYNC_INSTRUCTIONS
