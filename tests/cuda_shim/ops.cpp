// tests/passes/ops.cpp once more: as torch.ops.fastsync_emulated, for tensors on a CPU, where the passes of passes/cuda
// run. Compiled with -Dfastsync=fastsync_emulated, like all that belongs to it.
#include <torch/library.h>
#undef TORCH_LIBRARY
#define TORCH_LIBRARY TORCH_LIBRARY_FRAGMENT  // which takes a name that is a macro

#include <vector>

#include "../passes/ops.cpp"
#include "cuda_runtime.h"
#include "passes/aten/passes.h"
#include "passes/cuda/chunk_table.h"

namespace fastsync::cpu {
namespace {

// One for all calls: each has to leave it ready for the next.
void* totals() {
  alignas(double) static std::byte bytes[cuda::kTotalsBytes] = {};
  return bytes;
}

// Calls the pass with the chunks that it wants on the device.
template <class Args>
void run(void (*pass)(const Args&, const Scratch&, void*), const Args& args) {
  Scratch scratch{totals()};
  std::vector<Segment> uploaded;
  if (const int64_t chunk_size = cuda::chunk_size(args.num_segments, args.grad_dtype, args.wire_dtype)) {
    const auto chunks = cuda::cut_into_chunks(args.segments, args.num_segments, chunk_size, args.grad_dtype);
    scratch.num_chunks = static_cast<int64_t>(chunks.size());
    uploaded.resize(chunks.size() + 1);
    cuda::upload(chunks.data(), scratch.num_chunks, uploaded.data(), nullptr);
    scratch.chunks = uploaded.data();
  }
  pass(args, scratch, nullptr);
}

void pack(const PackArgs& args, const Scratch&, void*) { run(&cuda::pack, args); }
void unpack(const UnpackArgs& args, const Scratch&, void*) { run(&cuda::unpack, args); }
void reduce(const ReduceArgs& args, const Scratch&, void*) { cuda::reduce(args, {}, nullptr); }

}  // namespace

Passes passes() { return {&pack, &unpack, &reduce}; }

}  // namespace fastsync::cpu

// What backend.cpp refers to, and does not call here.
namespace fastsync::aten {

void pack(const PackArgs&, c10::Device) {}
void unpack(const UnpackArgs&, c10::Device) {}
void reduce(const ReduceArgs&, c10::Device) {}

}  // namespace fastsync::aten

// ---- chunk_table.h --------------------------------------------------------------------------------------------------

namespace fastsync {
namespace {

// Segments without gaps between them, of memory that nobody reads.
std::vector<Segment> segments_of(at::IntArrayRef numels, int64_t grad_bytes) {
  std::vector<Segment> segments;
  int64_t offset = 0;
  for (const int64_t numel : numels) {
    // NOLINTNEXTLINE: an address is a number here
    segments.push_back({reinterpret_cast<void*>(1 + offset * grad_bytes), numel, offset});
    offset += numel;
  }
  return segments;
}

// (begin, length) of every chunk, one after the other, where it begins on the wire. Its memory has to begin there, too.
std::vector<int64_t> described(const std::vector<Segment>& chunks, int64_t grad_bytes) {
  std::vector<int64_t> rows;
  for (const Segment& chunk : chunks) {
    TORCH_CHECK(reinterpret_cast<intptr_t>(chunk.data) == 1 + chunk.offset * grad_bytes, "the chunk at ", chunk.offset,
                " has other memory");
    TORCH_CHECK(chunk.residual == nullptr, "the chunk at ", chunk.offset, " has a residual");
    rows.insert(rows.end(), {chunk.offset, chunk.numel});
  }
  return rows;
}

std::vector<int64_t> chunks_of_host(at::IntArrayRef numels, int64_t chunk_size) {
  const auto segments = segments_of(numels, sizeof(double));
  return described(cuda::cut_into_chunks(segments.data(), numels.size(), chunk_size, DType::kFloat64), sizeof(double));
}

std::vector<int64_t> chunks_of_kernel(at::IntArrayRef numels, int64_t chunk_size) {
  const auto segments = segments_of(numels, sizeof(Half));
  const auto table = cuda::ChunkTable::of_few(segments.data(), numels.size(), chunk_size);
  std::vector<Segment> chunks;
  for (int64_t index = 0; index < table.num_chunks; ++index) {
    chunks.push_back(table.at(index, chunk_size, sizeof(Half), sizeof(float)));
  }
  return described(chunks, sizeof(Half));
}

}  // namespace
}  // namespace fastsync

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("set_descending", &emulator::set_descending);
  library.def("chunks_of_host(int[] numels, int chunk_size) -> int[]", &fastsync::chunks_of_host);
  library.def("chunks_of_kernel(int[] numels, int chunk_size) -> int[]", &fastsync::chunks_of_kernel);
}
