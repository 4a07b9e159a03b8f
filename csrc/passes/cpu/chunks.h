// The CPU's passes run over chunks of the segments, shared out over at::parallel_for.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "passes/pack_unpack.h"

namespace fastsync::cpu {

// A multiple of kBlockValues, so that a chunk begins where a block does.
constexpr int64_t kChunkSize = 32768;

struct Chunk {
  const Segment& segment;
  int64_t begin;  // in elements, within the segment
  int64_t length;
};

// Runs work(segment, chunk) -> Partial for every chunk and returns the partials in the chunks' order.
template <class Partial, class Work>
std::vector<Partial> for_each_chunk(const Segment* segments, int64_t num_segments, const Work& work) {
  std::vector<Chunk> chunks;
  int64_t numel = 0;
  for (const Segment* segment = segments; segment < segments + num_segments; ++segment) {
    for (int64_t begin = 0; begin < segment->numel; begin += kChunkSize) {
      chunks.push_back({*segment, begin, std::min(kChunkSize, segment->numel - begin)});
    }
    numel += segment->numel;
  }
  std::vector<Partial> partials(chunks.size());
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      partials[index] = work(chunks[index].segment, chunks[index]);
    }
  };
  if (numel <= kChunkSize) {  // waking a thread costs more than this little work
    run(0, static_cast<int64_t>(chunks.size()));
  } else {
    at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, run);
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
