// The passes of pack_unpack.h on a CPU: chunks of the segments, shared out over threads, each done by the loops of the
// best instruction set that the machine has.
#include "passes/pack_unpack.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "passes/cpu/tally.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define FASTSYNC_HAS_AVX2 1
#else
#define FASTSYNC_HAS_AVX2 0
#endif
#define FASTSYNC_INLINE __attribute__((always_inline)) inline

namespace fastsync::cpu {
namespace {

// Several ranks' wires, of which each holds the same elements.
struct Wires {
  const void* first;
  int64_t num;
  int64_t stride_bytes;

  template <class W>
  const W* at(int64_t wire, int64_t index) const {
    return unit_at<W>(static_cast<const char*>(first) + wire * stride_bytes, index);
  }
};

namespace any {
#define FASTSYNC_AVX2_LOOPS 0
#include "passes/cpu/loops.h"
#undef FASTSYNC_AVX2_LOOPS
}  // namespace any

#if FASTSYNC_HAS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#define FASTSYNC_AVX2_LOOPS 1
#include "passes/cpu/loops.h"
#undef FASTSYNC_AVX2_LOOPS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// ATEN_CPU_CAPABILITY=default, which makes torch itself do without vector instructions, does so here too.
#if FASTSYNC_HAS_AVX2
bool has_avx2() {
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && at::get_cpu_capability() != "DEFAULT";
  return has;
}
#define FASTSYNC_BEST(...) (has_avx2() ? avx2::__VA_ARGS__ : any::__VA_ARGS__)
#else
#define FASTSYNC_BEST(...) any::__VA_ARGS__
#endif

// A multiple of kBlockValues, so that a chunk begins where a block does.
constexpr int64_t kChunkSize = 32768;

struct Chunk {
  const Segment& segment;
  int64_t begin;  // in elements, within the segment
  int64_t length;

  template <class G>
  G* data() const {
    return static_cast<G*>(segment.data) + begin;
  }
  template <class C>
  C* residual() const {
    return segment.residual == nullptr ? nullptr : static_cast<C*>(segment.residual) + begin;
  }
  int64_t place() const { return segment.offset + begin; }  // on the wire
};

// Runs work(chunk) -> Tally for every chunk of the segments, and adds up what they return, in the chunks' order.
template <class Work>
Tally for_each_chunk(const Segment* segments, int64_t num_segments, const Work& work) {
  std::vector<Chunk> chunks;
  int64_t numel = 0;
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    for (int64_t begin = 0; begin < segment->numel; begin += kChunkSize) {
      chunks.push_back({*segment, begin, std::min(kChunkSize, segment->numel - begin)});
    }
    numel += segment->numel;
  }
  std::vector<Tally> tallies(chunks.size());
  const auto run = [&](int64_t begin, int64_t end) {
    std::transform(chunks.begin() + begin, chunks.begin() + end, tallies.begin() + begin, work);
  };
  if (numel <= kChunkSize) {  // waking a thread costs more than this little work
    run(0, static_cast<int64_t>(chunks.size()));
  } else {
    at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, run);
  }
  Tally total;
  for (const Tally& tally : tallies) {
    total.add(tally);
  }
  return total;
}

template <class C>
C value_or_one(const float* scale) {
  return static_cast<C>(scale != nullptr ? *scale : 1.0F);
}

template <class G, class W>
void pack_typed(const PackArgs& args) {
  using C = Compute<G>;
  const auto multiplier = static_cast<C>(args.multiplier) * value_or_one<C>(args.bucket_scale);
  const auto weight = static_cast<C>(args.weight != nullptr ? *args.weight : 1.0);
  const Tally tally = for_each_chunk(args.segments, args.num_segments, [&](const Chunk& chunk) {
    return FASTSYNC_BEST(pack_chunk<W>(chunk.data<const G>(), chunk.residual<C>(), chunk.length, multiplier,
                                       limit_on<W, C>(args.limit), weight, args.wire, chunk.place()));
  });
  args.stats[kNumSaturated] =
      (args.turn.is_first ? 0.0 : args.stats[kNumSaturated]) + static_cast<double>(tally.num_saturated);
}

template <class G, class W>
void unpack_typed(const UnpackArgs& args) {
  using C = Compute<G>;
  const C inverse_scale = C(1) / value_or_one<C>(args.bucket_scale);
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const Tally tally = for_each_chunk(args.segments, args.num_segments, [&](const Chunk& chunk) {
    return FASTSYNC_BEST(unpack_chunk<W>(wires, chunk.place(), chunk.data<G>(), chunk.length,
                                         static_cast<C>(args.multiplier), inverse_scale));
  });
  tally.write_to(args.stats, args.turn.is_first);
  if (args.turn.is_last && args.bucket_scale != nullptr) {
    *args.bucket_scale = next_bucket_scale(*args.bucket_scale, args.stats[kMaxMagnitude] * args.scale_share);
  }
}

template <class C, class W, class Out>
void reduce_typed(const ReduceArgs& args) {
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const C scale = value_or_one<C>(args.bucket_scale) * static_cast<C>(args.residual_share);
  const Segment all{nullptr, args.numel, 0, args.residual};
  for_each_chunk(&all, 1, [&](const Chunk& chunk) {
    return FASTSYNC_BEST(reduce_chunk<C, W, Out>(wires, chunk.begin, chunk.length, static_cast<C>(args.multiplier),
                                                 limit_on<Out, C>(args.limit), scale, chunk.residual<C>(), args.out));
  });
}

}  // namespace

void pack(const PackArgs& args, void* /*workspace*/, void* /*stream*/) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { pack_typed<decltype(grad), decltype(wire)>(args); });
}

void unpack(const UnpackArgs& args, void* /*workspace*/, void* /*stream*/) {
  dispatch_wire(args.grad_dtype, args.wire_dtype,
                [&](auto grad, auto wire) { unpack_typed<decltype(grad), decltype(wire)>(args); });
}

void reduce(const ReduceArgs& args, void* /*workspace*/, void* /*stream*/) {
  dispatch_reduce(args.grad_dtype, args.wire_dtype, args.out_dtype, [&](auto compute, auto wire, auto out) {
    reduce_typed<decltype(compute), decltype(wire), decltype(out)>(args);
  });
}

}  // namespace fastsync::cpu
