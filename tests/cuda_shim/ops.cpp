// csrc/testing_ops.cpp once more: as torch.ops.fastsync_emulated, for tensors on a CPU, where the passes of passes/cuda
// run. Compiled with -Dfastsync=fastsync_emulated, like all that belongs to it.
#include <torch/library.h>
#undef TORCH_LIBRARY
#define TORCH_LIBRARY TORCH_LIBRARY_FRAGMENT  // which takes a name that is a macro

#include <memory>

#include "cuda_runtime.h"
#include "passes/aten/passes.h"
#include "passes/cuda/chunk_table.h"
#include "testing_ops.cpp"

namespace fastsync::cpu {
namespace {

// One for all calls: each has to leave it ready for the next.
void* workspace() {
  alignas(double) static std::byte bytes[cuda::kWorkspaceBytes] = {};
  return bytes;
}

}  // namespace

void pack(const PackArgs& args, void*, void*) { cuda::pack(args, workspace(), nullptr); }
void unpack(const UnpackArgs& args, void*, void*) { cuda::unpack(args, workspace(), nullptr); }
void reduce(const ReduceArgs& args, void*, void*) { cuda::reduce(args, nullptr, nullptr); }

}  // namespace fastsync::cpu

// What backend.cpp refers to, and does not call here.
namespace fastsync::aten {

void pack(const PackArgs&, c10::Device) {}
void unpack(const UnpackArgs&, c10::Device) {}
void reduce(const ReduceArgs&, c10::Device) {}

}  // namespace fastsync::aten

// ---- chunk_table.h by lengths alone ---------------------------------------------------------------------------------

namespace fastsync {
namespace {

// (segment, begin, length) of every chunk, one after the other; each is found, and follows the one before.
std::vector<int64_t> chunk_table(at::IntArrayRef numels, int64_t chunk_size) {
  const auto chunks = std::make_unique<cuda::ChunkTable<2000>>();
  for (const int64_t numel : numels) {
    chunks->add({nullptr, numel, 0}, chunk_size);
  }
  std::vector<int64_t> table;
  cuda::Chunk next = chunks->find(0, chunk_size);
  for (int64_t index = 0; index < chunks->num_chunks(); ++index) {
    const cuda::Chunk chunk = chunks->find(index, chunk_size);
    TORCH_CHECK(next.segment == chunk.segment && next.begin == chunk.begin && next.length == chunk.length, "chunk ",
                index, " does not follow the one before");
    table.insert(table.end(), {chunk.segment, chunk.begin, chunk.length});
    next = chunks->next(chunk, chunk_size);
  }
  TORCH_CHECK(next.length == 0, "there is a chunk behind the last one");
  return table;
}

}  // namespace
}  // namespace fastsync

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("set_descending", &emulator::set_descending);
  library.def("chunk_table(int[] numels, int chunk_size) -> int[]", &fastsync::chunk_table);
}
