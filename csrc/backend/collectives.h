// Collectives of bytes in the memory of one host. All ranks call the same one, with the same sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/reductions.h"
#include "backend/rounds.h"

namespace fastsync {

// Pieces of memory, one for each rank.
using Pieces = std::vector<std::byte*>;

void barrier(Rounds& rounds);

void broadcast(Rounds& rounds, std::byte* data, int64_t bytes, int64_t root);

// Reduces in rank order, so that all ranks get the same bits.
void all_reduce(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction);

// Only the root's data change.
void reduce(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction, int64_t root);

// Reduces piece r of all ranks into rank r's output. The output may be this rank's own piece.
void reduce_scatter(Rounds& rounds, const Pieces& pieces, std::byte* output, int64_t bytes, Reduction reduction);

// The input may be this rank's own output.
void all_gather(Rounds& rounds, const std::byte* input, const Pieces& outputs, int64_t bytes);

// Only the root has outputs.
void gather(Rounds& rounds, const std::byte* input, const Pieces& outputs, int64_t bytes, int64_t root);

// Only the root has inputs.
void scatter(Rounds& rounds, const Pieces& inputs, std::byte* output, int64_t bytes, int64_t root);

// Piece r of the inputs goes to rank r. Sizes are in bytes. Those of two ranks must agree on what one sends the other.
void all_to_all(Rounds& rounds, const Pieces& inputs, const std::vector<int64_t>& input_bytes, const Pieces& outputs,
                const std::vector<int64_t>& output_bytes);

}  // namespace fastsync
