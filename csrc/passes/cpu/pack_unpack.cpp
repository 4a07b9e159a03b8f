// The passes of pack_unpack.h on a CPU. Threads share out the tiles of the segments, and run the loops of the best
// instruction set that the machine has.
#include "passes/pack_unpack.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <vector>

#include "passes/cpu/instruction_sets.h"
#include "passes/cpu/tiles.h"

#if FASTSYNC_HAS_AVX2
#include <cpuid.h>
#endif

namespace fastsync::cpu {
namespace {

// A multiple of kBlockValues, so that a tile begins where a block does.
constexpr int64_t kTileSize = 32768;

#if FASTSYNC_HAS_AVX2
// clang 14 has no __builtin_cpu_supports("f16c").
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// ATEN_CPU_CAPABILITY=default turns vector instructions off here, as it does in torch.
bool has_avx2() { return __builtin_cpu_supports("avx2") && has_f16c() && at::get_cpu_capability() != "DEFAULT"; }
#endif

}  // namespace

Tally for_each_tile(const Segment* segments, int64_t num_segments, c10::function_ref<Tally(const Tile&)> work) {
  std::vector<Tile> tiles;
  int64_t numel = 0;
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    for (int64_t begin = 0; begin < segment->numel; begin += kTileSize) {
      tiles.push_back({*segment, begin, std::min(kTileSize, segment->numel - begin)});
    }
    numel += segment->numel;
  }
  std::vector<Tally> tallies(tiles.size());
  const auto run = [&](int64_t begin, int64_t end) {
    std::transform(tiles.begin() + begin, tiles.begin() + end, tallies.begin() + begin, work);
  };
  if (numel <= kTileSize) {  // waking a thread costs more than this little work
    run(0, static_cast<int64_t>(tiles.size()));
  } else {
    at::parallel_for(0, static_cast<int64_t>(tiles.size()), 1, run);
  }
  Tally total;
  for (const Tally& tally : tallies) {
    total.add(tally);
  }
  return total;
}

Passes passes() {
#if FASTSYNC_HAS_AVX2
  if (has_avx2()) {
    return {&avx2::pack, &avx2::unpack, &avx2::reduce};
  }
#endif
  return {&any::pack, &any::unpack, &any::reduce};
}

}  // namespace fastsync::cpu
