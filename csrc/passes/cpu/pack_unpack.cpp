// The passes of pack_unpack.h on a CPU: chunks of the segments, shared out over threads, each done by the loops of the
// best instruction set that the machine has.
#include <ATen/Version.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "passes/cpu/chunks.h"
#include "passes/cpu/tally.h"
#include "passes/pack_unpack.h"

#define FASTSYNC_INLINE __attribute__((always_inline)) inline

namespace fastsync::cpu {
namespace {

// What is done to a value before it is encoded.
template <class C>
struct Scaling {
  C multiplier;
  C limit;
};

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

template <class C, class W>
C decode_at(const W* wire, int64_t i) {
  if constexpr (kIsBlock<W>) {
    const W& block = wire[i / kBlockValues];
    int32_t numbers[4];
    W::get(block.bytes + i % kBlockValues / 4 * 4 * W::kBits / 8, numbers);
    return static_cast<C>(static_cast<float>(numbers[i % 4]) * block.scale);
  } else {
    return static_cast<C>(decode(wire[i]));
  }
}

// kBlock values of memory that may end before: then they are worked on as a copy, which zeros fill up.
template <class T>
class Whole {
 public:
  Whole(T* memory, int64_t num_units) : memory_(memory), num_units_(num_units) {
    if (is_copy()) {
      std::fill(std::copy_n(memory, num_units, copy_), copy_ + kNumUnits, T{});
    }
  }
  T* data() { return is_copy() ? copy_ : memory_; }
  void put_back() {
    if (is_copy()) {
      std::copy_n(copy_, num_units_, memory_);
    }
  }

 private:
  static constexpr int64_t kNumUnits = num_units<std::remove_const_t<T>>(kBlock);
  bool is_copy() const { return num_units_ < kNumUnits && memory_ != nullptr; }

  T* memory_;
  int64_t num_units_;
  std::remove_const_t<T> copy_[kNumUnits];
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

template <class C>
C value_or_one(const float* scale) {
  return static_cast<C>(scale != nullptr ? *scale : 1.0F);
}

template <class G, class W>
void pack_typed(const PackArgs& args) {
  using C = Compute<G>;
  const auto multiplier = static_cast<C>(args.multiplier) * value_or_one<C>(args.bucket_scale);
  const Scaling<C> scaling{multiplier, limit_on<W, C>(args.limit)};
  const auto weight = static_cast<C>(args.weight != nullptr ? *args.weight : 1.0);
  const auto counts =
      for_each_chunk<int64_t>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        auto* residual = from_or_null(static_cast<C*>(segment.residual), chunk.begin);
        return FASTSYNC_BEST(pack_chunk<W>(chunk_data<const G>(segment, chunk), residual, chunk.length, scaling, weight,
                                           args.wire, segment.offset + chunk.begin));
      });
  double num_saturated = args.turn.is_first ? 0.0 : args.stats[kNumSaturated];
  for (const int64_t count : counts) {
    num_saturated += static_cast<double>(count);
  }
  args.stats[kNumSaturated] = num_saturated;
}

template <class G, class W>
void unpack_typed(const UnpackArgs& args) {
  using C = Compute<G>;
  const C inverse_scale = C(1) / value_or_one<C>(args.bucket_scale);
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const auto tallies =
      for_each_chunk<Tally>(args.segments, args.num_segments, [&](const Segment& segment, const Chunk& chunk) {
        return FASTSYNC_BEST(unpack_chunk<W>(wires, segment.offset + chunk.begin, chunk_data<G>(segment, chunk),
                                             chunk.length, static_cast<C>(args.multiplier), inverse_scale));
      });
  total_of(tallies).write_to(args.stats, args.turn.is_first);
  if (args.turn.is_last && args.bucket_scale != nullptr) {
    *args.bucket_scale = next_bucket_scale(*args.bucket_scale, args.stats[kMaxMagnitude] * args.scale_share);
  }
}

template <class C, class W, class Out>
void reduce_typed(const ReduceArgs& args) {
  const Wires wires{args.wire, args.num_wires, args.stride_bytes};
  const Scaling<C> scaling{C(1), limit_on<Out, C>(args.limit)};
  const C scale = value_or_one<C>(args.bucket_scale) * static_cast<C>(args.residual_share);
  const Segment all{nullptr, args.numel, 0};
  for_each_chunk<char>(&all, 1, [&](const Segment&, const Chunk& chunk) {
    FASTSYNC_BEST(reduce_chunk<C, W, Out>(wires, chunk.begin, chunk.length, static_cast<C>(args.multiplier), scaling,
                                          scale, static_cast<C*>(args.residual), args.out));
    return char{};
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
