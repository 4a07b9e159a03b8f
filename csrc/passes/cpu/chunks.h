// The CPU's passes run over chunks of the segments, shared out over at::parallel_for.
#pragma once

#include <ATen/Parallel.h>

#include <vector>

#include "passes/chunk_table.h"
#include "passes/pack_unpack.h"

namespace fastsync::cpu {

// A multiple of kBlockValues, so that a chunk begins where a block does.
constexpr int64_t kChunkSize = 32768;

// Runs work(segment, chunk) -> Partial for every chunk and returns the partials in the chunks' order.
template <class Partial, class Work>
std::vector<Partial> for_each_chunk(const Segment* segments, int64_t num_segments, const Work& work) {
  std::vector<int64_t> first_chunk(num_segments + 1);
  number_chunks(segments, num_segments, kChunkSize, first_chunk.data());
  std::vector<Partial> partials(first_chunk[num_segments]);
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Chunk chunk = find_chunk(segments, first_chunk.data(), num_segments, kChunkSize, index);
      partials[index] = work(segments[chunk.segment], chunk);
    }
  };
  int64_t numel = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    numel += segments[s].numel;
  }
  if (numel <= kChunkSize) {  // waking a thread costs more than this little work
    run(0, first_chunk[num_segments]);
  } else {
    at::parallel_for(0, first_chunk[num_segments], 1, run);
  }
  return partials;
}

template <class G>
G* chunk_data(const Segment& segment, const Chunk& chunk) {
  return static_cast<G*>(segment.data) + chunk.begin;
}

// Further on in a vector, if there is one.
template <class T>
T* from_or_null(T* data, int64_t begin) {
  return data != nullptr ? data + begin : nullptr;
}

}  // namespace fastsync::cpu
