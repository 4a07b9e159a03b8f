// tests/passes/ops.cpp once more: as torch.ops.fastsync_emulated, for tensors on a CPU, where the passes of passes/cuda
// run. Compiled with -Dfastsync=fastsync_emulated, like all that belongs to it.
#include <torch/library.h>
#undef TORCH_LIBRARY
#define TORCH_LIBRARY TORCH_LIBRARY_FRAGMENT  // which takes a name that is a macro

#include <vector>

#include "../passes/ops.cpp"
#include "cuda_runtime.h"
#include "passes/aten/passes.h"
#include "passes/cuda/tile_table.h"

namespace fastsync::cpu {
namespace {

// One for all calls: each has to leave it ready for the next.
void* totals() {
  alignas(double) static std::byte bytes[cuda::kTotalsBytes] = {};
  return bytes;
}

// Calls the pass with the tiles that it wants on the device.
template <class Args>
void run(void (*pass)(const Args&, const Scratch&, void*), const Args& args) {
  Scratch scratch{totals()};
  std::vector<Segment> uploaded;
  if (const int64_t tile_size = cuda::tile_size(args.num_segments, args.grad_dtype, args.wire_dtype)) {
    const auto tiles = cuda::cut_into_tiles(args.segments, args.num_segments, tile_size, args.grad_dtype,
                                            /*have_factors=*/std::is_same_v<Args, UnpackArgs>);
    scratch.num_tiles = static_cast<int64_t>(tiles.size());
    uploaded.resize(tiles.size() + 1);
    cuda::upload(tiles.data(), scratch.num_tiles, uploaded.data(), nullptr);
    scratch.tiles = uploaded.data();
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

// ---- tile_table.h --------------------------------------------------------------------------------------------------

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

// (begin, length) of every tile, one after the other, where it begins on the wire. Its memory has to begin there, too.
std::vector<int64_t> described(const std::vector<Segment>& tiles, int64_t grad_bytes) {
  std::vector<int64_t> rows;
  for (const Segment& tile : tiles) {
    TORCH_CHECK(reinterpret_cast<intptr_t>(tile.data) == 1 + tile.offset * grad_bytes, "the tile at ", tile.offset,
                " has other memory");
    TORCH_CHECK(tile.operand == nullptr, "the tile at ", tile.offset, " has an operand");
    rows.insert(rows.end(), {tile.offset, tile.numel});
  }
  return rows;
}

std::vector<int64_t> tiles_of_host(at::IntArrayRef numels, int64_t tile_size) {
  const auto segments = segments_of(numels, sizeof(double));
  return described(cuda::cut_into_tiles(segments.data(), numels.size(), tile_size, DType::kFloat64,
                                        /*have_factors=*/false),
                   sizeof(double));
}

std::vector<int64_t> tiles_of_kernel(at::IntArrayRef numels, int64_t tile_size) {
  const auto segments = segments_of(numels, sizeof(Half));
  const auto table = cuda::TileTable::of_few(segments.data(), numels.size(), tile_size);
  std::vector<Segment> tiles;
  for (int64_t index = 0; index < table.num_tiles; ++index) {
    tiles.push_back(table.at(index, tile_size, sizeof(Half), sizeof(float)));
  }
  return described(tiles, sizeof(Half));
}

}  // namespace
}  // namespace fastsync

TORCH_LIBRARY_FRAGMENT(fastsync, library) {
  library.def("set_descending", &emulator::set_descending);
  library.def("tiles_of_host(int[] numels, int tile_size) -> int[]", &fastsync::tiles_of_host);
  library.def("tiles_of_kernel(int[] numels, int tile_size) -> int[]", &fastsync::tiles_of_kernel);
}
