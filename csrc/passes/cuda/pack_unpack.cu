// The passes on a GPU. One launch serves the segments of a call, whose table is a kernel argument. In this file a block
// is a block of threads, unless it is said to be a wire's. The launch's blocks share out the chunks. The last block to
// finish adds up the statistics of all blocks, so that these cost no launch.
#include "passes/pack_unpack.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "passes/cuda/chunk_table.h"
#include "passes/cuda/passes.cuh"
#include "passes/cuda/sums.cuh"

namespace fastsync::cuda {
namespace {

// The number of blocks does not depend on the device. It determines the order of sums, and all GPUs are to give the
// same statistics. kBlocksAtOnce blocks fit on an H100 SXM or an H200 at once. On an H100, large calls were faster with
// more blocks, of at least kMinChunks chunks each.
constexpr int kMinBlocksPerMultiprocessor = 4;
constexpr int64_t kBlocksAtOnce = 512;
constexpr int64_t kMinChunks = 4;

// The number of vectors that a thread loads before it uses the first. More values do not fit into its registers.
template <class Pass>
constexpr int kVectors = std::min(4, 16 / Pass::kWidth);

template <class Pass>
constexpr int kChunk = kThreads * kVectors<Pass> * Pass::kWidth;

// Converts one chunk. Neighbouring threads take neighbouring vectors. The threads of a warp encode a wire's block
// together, so all of them take part if one has a value in it. Input and output may be the same memory, but no thread
// writes what another one reads. The order of the sums does not depend on where in memory the values lie. A whole chunk
// has full length, and its gradients and its first wire are aligned.
template <bool kWhole, class Pass>
__device__ void convert_chunk(const Pass& pass, const Segment& segment, const Chunk& chunk,
                              typename Pass::Total& total) {
  static_assert(kChunk<Pass> % Pass::kUnit == 0);
  const auto length = static_cast<int>(chunk.length);
  const auto index_at = [](int v) { return (v * kThreads + static_cast<int>(threadIdx.x)) * Pass::kWidth; };
  const auto num_valid_at = [&](int v) {
    return kWhole ? Pass::kWidth : max(0, min(Pass::kWidth, length - index_at(v)));
  };
  const auto slice_at = [&](int v) { return Slice{segment, chunk.begin + index_at(v), num_valid_at(v), kWhole}; };
  const auto takes_part = [&](int v) { return kWhole || index_at(v) / Pass::kUnit * Pass::kUnit < length; };
  typename Pass::Loaded loaded[kVectors<Pass>];
#pragma unroll
  for (int v = 0; v < kVectors<Pass>; ++v) {
    if (takes_part(v)) {
      loaded[v] = pass.load(slice_at(v));
    }
  }
  typename Pass::Total::Batch batch{};
#pragma unroll
  for (int v = 0; v < kVectors<Pass>; ++v) {
    if (takes_part(v)) {
      typename Pass::C values[Pass::kWidth];
      pass.decode(slice_at(v), loaded[v], values);
      typename Pass::Total::Batch vector_batch{};  // separate, so that fewer roundings follow each other
      pass.encode(slice_at(v), values, vector_batch);
      batch.add(vector_batch);
    }
  }
  add_batch(batch, total, [&](auto& thread_total) {
    const auto* const gradient = static_cast<const typename Pass::Gradient*>(segment.data) + chunk.begin;
    for (int v = 0; v < kVectors<Pass>; ++v) {
      thread_total.add_values(gradient + index_at(v), num_valid_at(v));
    }
  });
}

// ---- one launch -----------------------------------------------------------------------------------------------------

// The table of one launch, which is a kernel argument. Buckets of ordinary size have fewer gradients than this.
constexpr int kMaxSegments = 160;
using LaunchTable = ChunkTable<kMaxSegments>;

template <class Pass>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerMultiprocessor)
    run_pass(const LaunchTable __grid_constant__ table, const Pass pass, BlockTotals<typename Pass::Total>* shared,
             Position position) {
  using Total = typename Pass::Total;
  Total total{};
  const Pass scaled = pass.with_scale();
  const int64_t end = table.num_chunks() * (blockIdx.x + 1) / gridDim.x;
  int64_t index = table.num_chunks() * blockIdx.x / gridDim.x;
  for (Chunk chunk = table.find(index, kChunk<Pass>); index < end; ++index) {
    const Segment& segment = table.segments[chunk.segment];
    if (chunk.length == kChunk<Pass> && pass.is_aligned(segment)) {
      convert_chunk<true>(scaled, segment, chunk, total);
    } else {
      convert_chunk<false>(scaled, segment, chunk, total);
    }
    if constexpr (requires { pass.fill_gap(segment); }) {
      if (chunk.begin + chunk.length == segment.numel) {
        pass.fill_gap(segment);
      }
    }
    chunk = table.next(chunk, kChunk<Pass>);
  }
  if constexpr (!std::is_same_v<Total, Nothing>) {
    if (write_stats(total, *shared, pass.stats, position.is_first) && position.is_last) {
      pass.move_on();  // every block has read the scale by now
    }
  }
}

template <class Pass>
void launch(LaunchTable& table, Position position, Pass pass, void* workspace, void* stream) {
  const int64_t num_at_once = std::clamp<int64_t>(table.num_chunks(), 1, kBlocksAtOnce);
  const int64_t num_blocks = std::clamp(table.num_chunks() / kMinChunks, num_at_once, kMaxBlocks);
  void* arguments[] = {&table, &pass, &workspace, &position};
  const cudaError_t error = cudaLaunchKernel(run_pass<Pass>, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads),
                                             arguments, 0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which is thrown here
    throw std::runtime_error(std::string("fastsync: launching ") + Pass::kName + " on " + std::to_string(num_blocks) +
                             " blocks failed: " + cudaGetErrorString(error));
  }
}

template <class Pass>
void run(const Segment* segments, int64_t num_segments, Position position, const Pass& pass, void* workspace,
         void* stream) {
  static_assert(sizeof(BlockTotals<typename Pass::Total>) <= kWorkspaceBytes);
  LaunchTable table{};
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    if (segment->numel == 0) {
      continue;
    }
    if (table.num_segments == kMaxSegments) {
      launch(table, Position{position.is_first, false}, pass, workspace, stream);
      table = {};
      position.is_first = false;
    }
    table.add(*segment, kChunk<Pass>);
  }
  launch(table, position, pass, workspace, stream);  // even without segments, because it writes statistics
}

}  // namespace

void pack(const PackArgs& args, void* workspace, void* stream) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using C = Compute<decltype(grad)>;
    using W = decltype(wire);
    const Pack<decltype(grad), W> pass{
        static_cast<W*>(args.wire), args.bucket_scale, args.weight,       static_cast<C>(args.multiplier),
        limit_on<W, C>(args.limit), args.stats,        args.gap_alignment};
    run(args.segments, args.num_segments, args.position, pass, workspace, stream);
  });
}

void unpack(const UnpackArgs& args, void* workspace, void* stream) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using Pass = Unpack<decltype(grad), decltype(wire)>;
    const Pass pass{{args.wire, args.num_wires, args.stride_bytes, static_cast<typename Pass::C>(args.multiplier)},
                    args.bucket_scale,
                    args.stats,
                    args.scale_share};
    run(args.segments, args.num_segments, args.position, pass, workspace, stream);
  });
}

void reduce(const ReduceArgs& args, void* workspace, void* stream) {
  if (args.numel == 0) {
    return;
  }
  dispatch_reduce(args.grad_dtype, args.wire_dtype, args.out_dtype, [&](auto compute, auto wire, auto out) {
    using C = decltype(compute);
    using Out = decltype(out);
    const Reduce<C, decltype(wire), Out> pass{
        {args.wire, args.num_wires, args.stride_bytes, static_cast<C>(args.multiplier)},
        static_cast<Out*>(args.out),
        limit_on<Out, C>(args.limit),
        args.bucket_scale,
        static_cast<C>(args.residual_share)};
    const Segment all{nullptr, args.numel, 0, args.residual};
    run(&all, 1, Position{}, pass, workspace, stream);
  });
}

}  // namespace fastsync::cuda
