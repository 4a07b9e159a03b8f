// The passes on a GPU. One launch serves the segments of a call. In this file a block is a block of threads, unless it
// is said to be a wire's. The launch's blocks share out the tiles of the segments. The last block to finish adds up
// the statistics of all blocks, so that these cost no launch.
#include "passes/pack_unpack.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "passes/cuda/passes.cuh"
#include "passes/cuda/sums.cuh"
#include "passes/cuda/tile_table.h"

namespace fastsync::cuda {
namespace {

// The number of blocks does not depend on the device. It determines the order of sums, and all GPUs are to give the
// same statistics. kBlocksAtOnce blocks fit on an H100 SXM or an H200 at once. On an H100, large calls were faster with
// more blocks, of at least kMinTiles tiles each. On an H200, calls of 25 MiB took up to a quarter longer with blocks
// of one tile, or with three blocks at once on a multiprocessor. Two blocks with eight vectors a thread gained
// nothing. There the last block's sum takes 2 us of an unpack, which has 9 us at 4 MiB and 21 us at 25 MiB.
constexpr int kMinBlocksPerMultiprocessor = 4;
constexpr int64_t kBlocksAtOnce = 512;
constexpr int64_t kMinTiles = 4;

// The number of vectors that a thread loads before it uses the first. More values do not fit into its registers.
template <class Pass>
constexpr int kVectors = std::min(4, 16 / Pass::kWidth);

template <class Pass>
constexpr int kTile = kThreads * kVectors<Pass> * Pass::kWidth;

// Converts one tile. Neighbouring threads take neighbouring vectors. The threads of a warp encode a wire's block
// together, so all of them take part if one has a value in it. Input and output may be the same memory, but no thread
// writes what another one reads. The order of the sums does not depend on where in memory the values lie. A whole tile
// has full length, and its gradients and its first wire are aligned.
template <bool kWhole, class Pass>
__device__ void convert_tile(const Pass& pass, const Segment& tile, typename Pass::Total& total) {
  static_assert(kTile<Pass> % Pass::kUnit == 0);
  const auto length = static_cast<int>(tile.numel);
  const auto index_at = [](int v) { return (v * kThreads + static_cast<int>(threadIdx.x)) * Pass::kWidth; };
  const auto num_valid_at = [&](int v) {
    return kWhole ? Pass::kWidth : max(0, min(Pass::kWidth, length - index_at(v)));
  };
  const auto slice_at = [&](int v) { return Slice{tile, index_at(v), num_valid_at(v), kWhole}; };
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
    const auto* const gradient = static_cast<const typename Pass::Gradient*>(tile.data);
    for (int v = 0; v < kVectors<Pass>; ++v) {
      thread_total.add_values(gradient + index_at(v), num_valid_at(v));
    }
  });
}

// ---- one launch -----------------------------------------------------------------------------------------------------

template <class Pass>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerMultiprocessor)
    run_pass(const TileTable __grid_constant__ table, const Pass pass, BlockTotals<typename Pass::Total>* shared,
             Position position) {
  using Total = typename Pass::Total;
  Total total{};
  const Pass scaled = pass.with_scale();
  for (int64_t index = blockIdx.x; index < table.num_tiles; index += gridDim.x) {
    const Segment tile = table.at(index, kTile<Pass>, sizeof(typename Pass::Gradient), Pass::kOperandBytes);
    const Pass own = scaled.with_factor(tile);
    if (tile.numel == kTile<Pass> && pass.is_aligned(tile)) {
      convert_tile<true>(own, tile, total);
    } else {
      convert_tile<false>(own, tile, total);
    }
    if constexpr (requires { pass.fill_gap(tile); }) {
      pass.fill_gap(tile);
    }
  }
  if constexpr (!std::is_same_v<Total, Nothing>) {
    if (write_stats(total, *shared, pass.stats, position.is_first) && position.is_last) {
      pass.move_on();  // every block has read the scale by now
    }
  }
}

void check(cudaError_t error, const char* kernel, int64_t num_blocks) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // clears the error, which is thrown here
    throw std::runtime_error(std::string("fastsync: launching ") + kernel + " on " + std::to_string(num_blocks) +
                             " blocks failed: " + cudaGetErrorString(error));
  }
}

// Launches even without tiles, because a pass writes statistics.
template <class Pass>
void launch(TileTable table, Position position, Pass pass, void* totals, void* stream) {
  static_assert(sizeof(BlockTotals<typename Pass::Total>) <= kTotalsBytes);
  const int64_t num_at_once = std::clamp<int64_t>(table.num_tiles, 1, kBlocksAtOnce);
  const int64_t num_blocks = std::clamp(table.num_tiles / kMinTiles, num_at_once, kMaxBlocks);
  void* arguments[] = {&table, &pass, &totals, &position};
  check(cudaLaunchKernel(run_pass<Pass>, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), arguments, 0,
                         static_cast<cudaStream_t>(stream)),
        Pass::kName, num_blocks);
}

template <class Args, class Pass>
void run(const Args& args, const Pass& pass, const Scratch& scratch, void* stream) {
  launch(scratch.tiles != nullptr ? TileTable::of_many(scratch.tiles, scratch.num_tiles)
                                  : TileTable::of_few(args.segments, args.num_segments, kTile<Pass>),
         args.position, pass, scratch.totals, stream);
}

// ---- the table of many segments -------------------------------------------------------------------------------------

// Arguments of a kernel may take up to 32,764 bytes. Blocks are small, so that many multiprocessors read them together.
constexpr int kTilesAtOnce = 1000;
constexpr int kUploadThreads = 8;

template <int kLength>
struct Part {
  Segment tiles[kLength];
};

template <int kLength>
__global__ void store_part(const Part<kLength> __grid_constant__ part, int num_tiles, Segment* to) {
  const int i = static_cast<int>(blockIdx.x) * kUploadThreads + static_cast<int>(threadIdx.x);
  if (i < num_tiles) {
    to[i] = part.tiles[i];
  }
}

template <int kLength>
void upload_part(const Segment* tiles, int num_tiles, Segment* to, void* stream) {
  Part<kLength> part;
  std::copy_n(tiles, num_tiles, part.tiles);
  const int num_blocks = (num_tiles + kUploadThreads - 1) / kUploadThreads;
  void* arguments[] = {&part, &num_tiles, &to};
  check(cudaLaunchKernel(store_part<kLength>, dim3(static_cast<unsigned>(num_blocks)), dim3(kUploadThreads), arguments,
                         0, static_cast<cudaStream_t>(stream)),
        "upload", num_blocks);
}

}  // namespace

int64_t tile_size(int64_t num_segments, DType grad, DType wire) {
  int64_t size = 0;
  if (num_segments > kFewSegments) {
    dispatch_wire(grad, wire, [&](auto g, auto w) {
      using G = decltype(g);
      using W = decltype(w);
      static_assert(kTile<Pack<G, W>> == kTile<Unpack<G, W>>);
      size = kTile<Pack<G, W>>;
    });
  }
  return size;
}

void upload(const Segment* tiles, int64_t num_tiles, Segment* to, void* stream) {
  constexpr int kFewTiles = kTilesAtOnce / 8;  // the host copies all arguments, used or not
  for (int64_t begin = 0; begin < num_tiles; begin += kTilesAtOnce) {
    const auto length = static_cast<int>(std::min<int64_t>(num_tiles - begin, kTilesAtOnce));
    if (length <= kFewTiles) {
      upload_part<kFewTiles>(tiles + begin, length, to + begin, stream);
    } else {
      upload_part<kTilesAtOnce>(tiles + begin, length, to + begin, stream);
    }
  }
}

void pack(const PackArgs& args, const Scratch& scratch, void* stream) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using C = Compute<decltype(grad)>;
    using W = decltype(wire);
    const Pack<decltype(grad), W> pass{
        static_cast<W*>(args.wire), args.bucket_scale, args.weight,       static_cast<C>(args.multiplier),
        limit_on<W, C>(args.limit), args.stats,        args.gap_alignment};
    run(args, pass, scratch, stream);
  });
}

void unpack(const UnpackArgs& args, const Scratch& scratch, void* stream) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using Pass = Unpack<decltype(grad), decltype(wire)>;
    const Pass pass{{args.wire, args.num_wires, args.stride_bytes, static_cast<typename Pass::C>(args.multiplier)},
                    args.bucket_scale,
                    args.stats,
                    args.scale_share};
    run(args, pass, scratch, stream);
  });
}

void reduce(const ReduceArgs& args, const Scratch& /*scratch*/, void* stream) {
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
    launch(TileTable::of_few(&all, 1, kTile<decltype(pass)>), Position{}, pass, nullptr, stream);
  });
}

}  // namespace fastsync::cuda
