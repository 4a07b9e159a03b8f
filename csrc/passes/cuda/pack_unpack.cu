// pack, unpack and measure on a GPU: one launch serves all segments of a call, whose table travels as a kernel
// argument. Blocks share out the chunks; the last block to finish adds the blocks' statistics up, so that they cost no
// launch.
#include "passes/pack_unpack.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "passes/chunk_table.h"
#include "passes/cuda/quads.cuh"
#include "passes/cuda/totals.cuh"

namespace fastsync::cuda {
namespace {

// kMaxBlocks blocks of kThreads fit on an H100 or H200 at once, so that a launch has no second wave. Their number does
// not follow the device, because the order of the sums follows their number: all GPUs give the same statistics.
constexpr int kMinBlocksPerMultiprocessor = 4;

// Each thread has this many vectors, of this size on the side with the wider type, in flight before it uses the first.
constexpr int kVectorBytes = 16;
constexpr int kVectorsPerThread = 4;

// ---- passes: what happens to one value ------------------------------------------------------------------------------

template <class G, class W>
struct Pack {
  using In = G;
  using Out = W;
  using Total = Saturations;
  static constexpr const char* kName = "pack";
  static constexpr bool kByQuads = false;
  static constexpr bool kWrites = true;

  W* wire;
  const float* bucket_scale;
  const double* weight;
  Compute<G> multiplier;
  Compute<G> limit;
  double* stats;
  int64_t alignment;
  bool counts_for_nothing = false;

  __device__ Pack with_scale() const {
    Pack scaled = *this;
    const auto own_weight = static_cast<Compute<G>>(*weight_or_unit(weight));
    scaled.multiplier *= static_cast<Compute<G>>(*scale_or_unit(bucket_scale));
    scaled.multiplier *= own_weight;
    scaled.counts_for_nothing = own_weight == Compute<G>(0);
    return scaled;
  }

  __device__ const G* input(const Segment& segment) const { return static_cast<const G*>(segment.data); }
  __device__ W* output(const Segment& segment) const { return wire + segment.offset; }

  __device__ W operator()(G gradient, Saturations& batch) const {
    bool saturated;
    const Compute<G> value = counts_for_nothing ? Compute<G>(0) : decode(gradient);
    const Compute<G> scaled = scale_and_clamp<Compute<G>>(value, multiplier, limit, saturated);
    batch.count += saturated;
    return encode<W>(static_cast<Compute<W>>(scaled));
  }

  __device__ void end_segment(const Segment& segment) const { fill_gap(wire, segment, alignment); }
  __device__ void move_on() const {}
};

template <class G, class W>
struct Unpack {
  using In = W;
  using Out = G;
  using Total = Squares<Compute<G>>;
  static constexpr const char* kName = "unpack";
  static constexpr bool kByQuads = false;
  static constexpr bool kWrites = true;

  const W* wire;
  float* bucket_scale;
  int64_t* step;
  Compute<G> multiplier;
  double* stats;
  double scale_share;

  __device__ Unpack with_scale() const {
    Unpack scaled = *this;
    scaled.multiplier /= static_cast<Compute<G>>(*scale_or_unit(bucket_scale));
    return scaled;
  }

  __device__ const W* input(const Segment& segment) const { return wire + segment.offset; }
  __device__ G* output(const Segment& segment) const { return static_cast<G*>(segment.data); }

  __device__ G operator()(W value, Total::Batch& batch) const {
    bool saturated;
    const G gradient = decode_to<G>(value, multiplier, saturated);
    batch.add_value(decode(gradient));
    batch.num_saturated += saturated;
    return gradient;
  }

  __device__ void end_segment(const Segment& /*segment*/) const {}
  __device__ void move_on() const { fastsync::move_on(bucket_scale, step, stats, scale_share); }
};

template <class G>
struct Measure {
  using In = G;
  using Out = G;
  using Total = Squares<Compute<G>>;
  static constexpr const char* kName = "measure";
  static constexpr bool kByQuads = false;
  static constexpr bool kWrites = false;

  double* stats;

  __device__ Measure with_scale() const { return *this; }
  __device__ const G* input(const Segment& segment) const { return static_cast<const G*>(segment.data); }
  __device__ G* output(const Segment& segment) const { return static_cast<G*>(segment.data); }

  __device__ G operator()(G gradient, Total::Batch& batch) const {
    batch.add_value(decode(gradient));
    return gradient;
  }

  __device__ void end_segment(const Segment& /*segment*/) const {}
  __device__ void move_on() const {}
};

// ---- one chunk ------------------------------------------------------------------------------------------------------

template <class Pass>
constexpr int kVector =
    kVectorBytes / static_cast<int>(std::max(sizeof(typename Pass::In), sizeof(typename Pass::Out)));

template <class Pass>
constexpr int chunk_size() {
  if constexpr (Pass::kByQuads) {
    return kQuadChunk;
  } else {
    return kThreads * kVectorsPerThread * kVector<Pass>;
  }
}

template <class Pass>
constexpr int kChunk = chunk_size<Pass>();

// What a thread has in flight where it goes by single values: the chunk's share, up to what its registers hold.
template <class Pass>
constexpr int kScalarsPerThread = std::min(8, kChunk<Pass> / kThreads);

template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Vector {
  T values[kWidth];
};

// How many elements come before the first that a vector of kWidth may begin at.
template <int kWidth, class T>
__device__ int elements_to_boundary(const T* data) {
  constexpr uintptr_t kBytes = kWidth * sizeof(T);
  const uintptr_t past = reinterpret_cast<uintptr_t>(data) % kBytes;
  return static_cast<int>((kBytes - past) % kBytes / sizeof(T));
}

// Input and output may be the same memory, so the loads of a batch are all written before its stores: the compiler may
// not move them there. Neighbouring threads take neighbouring vectors.
template <int kWidth, int kBatch, class Pass>
__device__ void convert(const Pass& pass, const typename Pass::In* input, typename Pass::Out* output, int num_vectors,
                        typename Pass::Total& total) {
  using InVector = Vector<typename Pass::In, kWidth>;
  using OutVector = Vector<typename Pass::Out, kWidth>;
  const auto* from = reinterpret_cast<const InVector*>(input);
  auto* to = reinterpret_cast<OutVector*>(output);
  for (int first = static_cast<int>(threadIdx.x); first < num_vectors; first += kBatch * kThreads) {
    InVector loaded[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      loaded[b] = first + b * kThreads < num_vectors ? from[first + b * kThreads] : InVector{};
    }
    const Pass scaled = pass.with_scale();  // read here, so that the loads above need not wait for the scale
    typename Pass::Total::Batch batch{};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (first + b * kThreads < num_vectors) {
        OutVector converted;
        typename Pass::Total::Batch of_vector{};  // of its own: fewer roundings follow each other
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          converted.values[i] = scaled(loaded[b].values[i], of_vector);
        }
        batch.add(of_vector);
        if constexpr (Pass::kWrites) {
          to[first + b * kThreads] = converted;
        }
      }
    }
    add_batch(batch, total, [&](typename Pass::Total& of_thread) {
      for (int b = 0; b < kBatch && first + b * kThreads < num_vectors; ++b) {
        of_thread.add_values(output + (first + b * kThreads) * kWidth, kWidth);
      }
    });
  }
}

// Vectors where both sides reach a boundary after equally many elements, which then come singly, as do those left over
// at the end. Everything singly where they do not; a warp's accesses are then coalesced still, only more of them.
template <class Pass>
__device__ void convert_chunk(const Pass& pass, const typename Pass::In* input, typename Pass::Out* output, int numel,
                              typename Pass::Total& total) {
  constexpr int kWidth = kVector<Pass>;
  const int boundary = elements_to_boundary<kWidth>(input);
  if (boundary != elements_to_boundary<kWidth>(output) || numel < boundary) {
    convert<1, kScalarsPerThread<Pass>>(pass, input, output, numel, total);
    return;
  }
  const int num_vectors = (numel - boundary) / kWidth;
  convert<kWidth, kVectorsPerThread>(pass, input + boundary, output + boundary, num_vectors, total);
  const int thread = static_cast<int>(threadIdx.x);
  const int edge = thread < boundary ? thread : thread + num_vectors * kWidth;
  if (edge < numel) {
    typename Pass::Total::Batch batch{};
    const auto converted = pass.with_scale()(input[edge], batch);
    if constexpr (Pass::kWrites) {
      output[edge] = converted;
    }
    add_batch(batch, total, [&](typename Pass::Total& of_thread) { of_thread.add_values(output + edge, 1); });
  }
}

// ---- one launch -----------------------------------------------------------------------------------------------------

// Kernel arguments may take 32,764 bytes; most calls have few segments, the DDP hook's one, and need not carry that
// much.
constexpr int kFewestSegments = 8;
constexpr int kFewSegments = 160;
constexpr int kManySegments = 676;

template <int kCapacity>
struct LaunchTable {
  Segment segments[kCapacity];
  int64_t first_chunk[kCapacity + 1];
  int64_t num_segments;
};

template <class Total>
struct Workspace {
  unsigned num_finished;
  Total of_block[kMaxBlocks];
};

// The sum over the block's threads, in a fixed order; thread 0 gets it. Between two calls the block has to synchronise.
template <class Total>
__device__ Total add_over_block(const Total& own) {
  __shared__ Total totals[kThreads];
  totals[threadIdx.x] = own;
  for (unsigned num_left = kThreads / 2; num_left > 0; num_left /= 2) {
    __syncthreads();
    if (threadIdx.x < num_left) {
      totals[threadIdx.x].add(totals[threadIdx.x + num_left]);
    }
  }
  return totals[threadIdx.x];
}

// Hands in this block's total; true for the block that finds all others' there. Synchronises the block.
template <class Total>
__device__ bool is_last_block(const Total& of_block, Workspace<Total>& workspace) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    workspace.of_block[blockIdx.x] = of_block;
    __threadfence();  // the total is seen before the count ...
    is_last = atomicAdd(&workspace.num_finished, 1U) == gridDim.x - 1;
    __threadfence();  // ... and whoever sees the count complete sees all totals
  }
  __syncthreads();
  return is_last;
}

template <class Pass, int kCapacity>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerMultiprocessor)
    run_pass(const LaunchTable<kCapacity> __grid_constant__ table, const Pass pass,
             Workspace<typename Pass::Total>* workspace, Turn turn) {
  using Total = typename Pass::Total;
  Total total{};
  for (int64_t index = blockIdx.x; index < table.first_chunk[table.num_segments]; index += gridDim.x) {
    const Chunk chunk = find_chunk(table.segments, table.first_chunk, table.num_segments, kChunk<Pass>, index);
    const Segment& segment = table.segments[chunk.segment];
    if constexpr (Pass::kByQuads) {
      convert_quads(pass, segment, chunk, total);
    } else {
      convert_chunk(pass, pass.input(segment) + chunk.begin, pass.output(segment) + chunk.begin,
                    static_cast<int>(chunk.length), total);
    }
    if (chunk.begin + chunk.length == segment.numel) {
      pass.end_segment(segment);
    }
  }
  if (!is_last_block(add_over_block(total), *workspace)) {
    return;
  }
  Total of_all{};
  for (unsigned block = threadIdx.x; block < gridDim.x; block += kThreads) {
    of_all.add(workspace->of_block[block]);
  }
  of_all = add_over_block(of_all);
  if (threadIdx.x == 0) {  // every block has read the scale by now
    of_all.add_to(pass.stats, turn.is_first);
    if (turn.is_last) {
      pass.move_on();
    }
    workspace->num_finished = 0;
  }
}

template <class Kernel>
void launch_kernel(Kernel* kernel, int64_t num_blocks, void** arguments, void* stream, const char* name) {
  const cudaError_t error = cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads), arguments,
                                             0, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) {
    cudaGetLastError();  // thrown here, so nobody else is to find it
    throw std::runtime_error(std::string("fastsync: launching ") + name + " on " + std::to_string(num_blocks) +
                             " blocks failed: " + cudaGetErrorString(error));
  }
}

template <int kCapacity, class Pass>
void launch(const Segment* segments, SegmentRange range, Turn turn, Pass pass, void* workspace, void* stream) {
  LaunchTable<kCapacity> table;
  Segment* const end = std::copy_if(segments + range.first, segments + range.second, table.segments,
                                    [](const Segment& segment) { return segment.numel > 0; });
  table.num_segments = end - table.segments;
  number_chunks(table.segments, table.num_segments, kChunk<Pass>, table.first_chunk);
  const int64_t num_blocks = std::clamp<int64_t>(table.first_chunk[table.num_segments], 1, kMaxBlocks);
  void* arguments[] = {&table, &pass, &workspace, &turn};
  launch_kernel(run_pass<Pass, kCapacity>, num_blocks, arguments, stream, Pass::kName);
}

template <class Pass>
void run(const Segment* segments, int64_t num_segments, Turn turn, const Pass& pass, void* workspace, void* stream) {
  static_assert(sizeof(Workspace<typename Pass::Total>) <= kWorkspaceBytes);
  const auto ranges = split_into_launches(segments, num_segments, kManySegments);
  for (const SegmentRange& range : ranges) {
    const Turn own{turn.is_first && &range == &ranges.front(), turn.is_last && &range == &ranges.back()};
    if (range.second - range.first <= kFewestSegments) {
      launch<kFewestSegments>(segments, range, own, pass, workspace, stream);
    } else if (range.second - range.first <= kFewSegments) {
      launch<kFewSegments>(segments, range, own, pass, workspace, stream);
    } else {
      launch<kManySegments>(segments, range, own, pass, workspace, stream);
    }
  }
}

template <class Pass>
__global__ void __launch_bounds__(kThreads, kMinBlocksPerMultiprocessor)
    run_reduce(const Segment all, const Pass pass) {
  typename Pass::Total total{};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kQuadChunk;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * kQuadChunk; begin < all.numel; begin += step) {
    convert_quads(pass, all, {0, begin, min(all.numel - begin, static_cast<int64_t>(kQuadChunk))}, total);
  }
}

template <class W>
double limit_of(double limit) {
  return std::is_same_v<W, Int8Block> ? std::min<double>(limit, kInt8Limit) : limit;
}

}  // namespace

void pack(const PackArgs& args, void* workspace, void* stream) {
  const bool feeds_back = std::any_of(args.segments, args.segments + args.num_segments,
                                      [](const Segment& segment) { return segment.residual != nullptr; });
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using G = decltype(grad);
    using W = decltype(wire);
    const auto multiplier = static_cast<Compute<G>>(args.multiplier);
    const auto limit = static_cast<Compute<G>>(limit_of<W>(args.limit));
    const auto run_with = [&](const auto& pass) {
      run(args.segments, args.num_segments, args.turn, pass, workspace, stream);
    };
    if constexpr (!std::is_same_v<W, Int8Block>) {
      if (!feeds_back) {
        return run_with(Pack<G, W>{static_cast<W*>(args.wire), args.bucket_scale, args.weight, multiplier, limit,
                                   args.stats, args.alignment});
      }
    }
    run_with(PackQuads<G, W>{args.wire, args.bucket_scale, args.weight, multiplier, limit, args.rounding, args.stats,
                             args.alignment});
  });
}

void unpack(const UnpackArgs& args, void* workspace, void* stream) {
  dispatch_wire(args.grad_dtype, args.wire_dtype, [&](auto grad, auto wire) {
    using G = decltype(grad);
    using W = decltype(wire);
    const auto run_with = [&](const auto& pass) {
      run(args.segments, args.num_segments, args.turn, pass, workspace, stream);
    };
    if constexpr (!std::is_same_v<W, Int8Block>) {
      if (args.num_wires == 1 && args.multiplier == 1.0) {
        return run_with(Unpack<G, W>{static_cast<const W*>(args.wire), args.bucket_scale, args.step, Compute<G>(1),
                                     args.stats, args.scale_share});
      }
    }
    const Sums<Compute<G>, W> sums{args.wire, args.num_wires, args.stride_bytes,
                                   static_cast<Compute<G>>(args.multiplier)};
    run_with(UnpackQuads<G, W>{sums, args.bucket_scale, args.step, args.stats, args.scale_share});
  });
}

void measure(const MeasureArgs& args, void* workspace, void* stream) {
  dispatch_grad(args.grad_dtype, [&](auto grad) {
    run(args.segments, args.num_segments, Turn{}, Measure<decltype(grad)>{args.stats}, workspace, stream);
  });
}

void reduce(const ReduceArgs& args, void* stream) {
  dispatch_reduce(args.grad_dtype, args.wire_dtype, args.out_dtype, [&](auto compute, auto wire, auto out) {
    using C = decltype(compute);
    using W = decltype(wire);
    using Out = decltype(out);
    using Pass = ReduceQuads<C, W, Out>;
    const Sums<C, W> sums{args.wire, args.num_wires, args.stride_bytes, static_cast<C>(args.multiplier)};
    Pass pass{sums, args.out, static_cast<C>(limit_of<Out>(args.limit)), args.bucket_scale, args.rounding};
    Segment all{nullptr, args.numel, 0, args.residual};
    const int64_t num_chunks = (args.numel + kQuadChunk - 1) / kQuadChunk;
    if (num_chunks > 0) {
      void* arguments[] = {&all, &pass};
      launch_kernel(run_reduce<Pass>, std::min(num_chunks, kMaxBlocks), arguments, stream, "reduce");
    }
  });
}

}  // namespace fastsync::cuda
