// The passes of pack_unpack.h on a CPU. Threads share out the chunks of the segments, and run the loops of the best
// instruction set that the machine has.
#include "passes/pack_unpack.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <algorithm>
#include <vector>

#include "passes/cpu/chunks.h"
#include "passes/cpu/instruction_sets.h"

#if FASTSYNC_HAS_AVX2
#include <cpuid.h>
#endif

namespace fastsync::cpu {
namespace {

// A multiple of kBlockValues, so that a chunk begins where a block does.
constexpr int64_t kChunkSize = 32768;

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

Tally for_each_chunk(const Segment* segments, int64_t num_segments, c10::function_ref<Tally(const Chunk&)> work) {
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

Passes passes() {
#if FASTSYNC_HAS_AVX2
  if (has_avx2()) {
    return {&avx2::pack, &avx2::unpack, &avx2::reduce};
  }
#endif
  return {&any::pack, &any::unpack, &any::reduce};
}

}  // namespace fastsync::cpu
