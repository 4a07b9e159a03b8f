#include "backend/collectives.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace fastsync {

namespace {

// Up to so many bytes each rank reduces all values itself, even if there are more than two ranks: a round costs more.
constexpr int64_t kReducedByAll = 16 << 10;
// Pieces of a place begin at multiples of a cache line, which is one of each dtype's size too.
constexpr int64_t kLine = 64;

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (to != from && bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

// Calls body with the offset and the length of each chunk.
template <class Body>
void for_each_chunk(int64_t bytes, int64_t most, const Body& body) {
  for (int64_t offset = 0; offset < bytes; offset += most) {
    body(offset, std::min(most, bytes - offset));
  }
}

// How much of a place each rank's piece gets.
int64_t share_of_place(const Rounds& rounds) { return rounds.place_bytes() / rounds.size() / kLine * kLine; }

// Reduces what all ranks have written for this round at the offset. `own` may be the output only if there are two
// ranks.
void reduce_places(Rounds& rounds, int64_t offset, const std::byte* own, std::byte* output, int64_t bytes,
                   Reduction reduction) {
  const auto values_of = [&](int64_t rank) { return rank == rounds.rank() ? own : rounds.readable(rank) + offset; };
  const std::byte* so_far = values_of(0);
  if (rounds.size() == 1) {
    copy_bytes(output, so_far, bytes);
  }
  for (int64_t rank = 1; rank < rounds.size(); ++rank) {
    reduction(so_far, values_of(rank), output, bytes);
    so_far = output;
  }
}

// Each rank reduces all values of the chunk.
void all_reduce_by_all(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction) {
  std::byte* const place = rounds.writable();
  copy_bytes(place, data, bytes);
  rounds.arrive();
  reduce_places(rounds, 0, rounds.size() == 2 ? data : place, data, bytes, reduction);
}

// Each rank reduces its shard of the chunk, and then gathers the other shards.
void all_reduce_by_shards(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction) {
  const int64_t size = rounds.size();
  const int64_t shard = (bytes + size * kLine - 1) / (size * kLine) * kLine;
  const auto begin_of = [&](int64_t rank) { return std::min(rank * shard, bytes); };
  const auto length_of = [&](int64_t rank) { return begin_of(rank + 1) - begin_of(rank); };
  const int64_t begin = begin_of(rounds.rank());
  const int64_t length = length_of(rounds.rank());
  std::byte* const place = rounds.writable();
  copy_bytes(place, data, bytes);
  rounds.arrive();
  std::byte* const reduced = rounds.writable();
  reduce_places(rounds, begin, place + begin, reduced, length, reduction);
  rounds.arrive();
  for (int64_t rank = 0; rank < size; ++rank) {
    copy_bytes(data + begin_of(rank), rounds.readable(rank), length_of(rank));
  }
}

}  // namespace

void barrier(Rounds& rounds) {
  rounds.arrive();
  rounds.wait_for_all();
}

void broadcast(Rounds& rounds, std::byte* data, int64_t bytes, int64_t root) {
  for_each_chunk(bytes, rounds.place_bytes(), [&](int64_t offset, int64_t length) {
    if (rounds.rank() == root) {
      copy_bytes(rounds.writable(), data + offset, length);
      rounds.arrive();
    } else {
      rounds.arrive();
      copy_bytes(data + offset, rounds.readable(root), length);
    }
  });
}

void all_reduce(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction) {
  const bool by_all = rounds.size() <= 2 || bytes <= kReducedByAll;
  for_each_chunk(bytes, rounds.place_bytes(), [&](int64_t offset, int64_t length) {
    (by_all ? all_reduce_by_all : all_reduce_by_shards)(rounds, data + offset, length, reduction);
  });
}

void reduce(Rounds& rounds, std::byte* data, int64_t bytes, Reduction reduction, int64_t root) {
  for_each_chunk(bytes, rounds.place_bytes(), [&](int64_t offset, int64_t length) {
    if (rounds.rank() != root) {
      copy_bytes(rounds.writable(), data + offset, length);
      rounds.arrive();
      return;
    }
    const bool needs_copy = rounds.size() > 2;
    std::byte* const place = needs_copy ? rounds.writable() : data + offset;
    copy_bytes(place, data + offset, length);
    rounds.arrive();
    reduce_places(rounds, 0, place, data + offset, length, reduction);
  });
}

void reduce_scatter(Rounds& rounds, const Pieces& pieces, std::byte* output, int64_t bytes, Reduction reduction) {
  const int64_t share = share_of_place(rounds);
  for_each_chunk(bytes, share, [&](int64_t offset, int64_t length) {
    std::byte* const place = rounds.writable();
    const bool needs_own = rounds.size() > 2;
    for (int64_t rank = 0; rank < rounds.size(); ++rank) {
      if (needs_own || rank != rounds.rank()) {
        copy_bytes(place + rank * share, pieces[rank] + offset, length);
      }
    }
    rounds.arrive();
    const int64_t begin = rounds.rank() * share;
    const std::byte* const own = needs_own ? place + begin : pieces[rounds.rank()] + offset;
    reduce_places(rounds, begin, own, output + offset, length, reduction);
  });
}

void all_gather(Rounds& rounds, const std::byte* input, const Pieces& outputs, int64_t bytes) {
  for_each_chunk(bytes, rounds.place_bytes(), [&](int64_t offset, int64_t length) {
    copy_bytes(rounds.writable(), input + offset, length);
    rounds.arrive();
    for (int64_t rank = 0; rank < rounds.size(); ++rank) {
      copy_bytes(outputs[rank] + offset, rank == rounds.rank() ? input + offset : rounds.readable(rank), length);
    }
  });
}

void gather(Rounds& rounds, const std::byte* input, const Pieces& outputs, int64_t bytes, int64_t root) {
  for_each_chunk(bytes, rounds.place_bytes(), [&](int64_t offset, int64_t length) {
    if (rounds.rank() != root) {
      copy_bytes(rounds.writable(), input + offset, length);
      rounds.arrive();
      return;
    }
    rounds.arrive();
    for (int64_t rank = 0; rank < rounds.size(); ++rank) {
      copy_bytes(outputs[rank] + offset, rank == root ? input + offset : rounds.readable(rank), length);
    }
  });
}

void scatter(Rounds& rounds, const Pieces& inputs, std::byte* output, int64_t bytes, int64_t root) {
  const int64_t share = share_of_place(rounds);
  for_each_chunk(bytes, share, [&](int64_t offset, int64_t length) {
    if (rounds.rank() != root) {
      rounds.arrive();
      copy_bytes(output + offset, rounds.readable(root) + rounds.rank() * share, length);
      return;
    }
    std::byte* const place = rounds.writable();
    for (int64_t rank = 0; rank < rounds.size(); ++rank) {
      copy_bytes(rank == root ? output + offset : place + rank * share, inputs[rank] + offset, length);
    }
    rounds.arrive();
  });
}

// Ranks have different numbers of rounds to fill. So each piece begins with how many its rank has, and how long it is.
void all_to_all(Rounds& rounds, const Pieces& inputs, const std::vector<int64_t>& input_bytes, const Pieces& outputs,
                const std::vector<int64_t>& output_bytes) {
  struct alignas(kLine) Header {
    int64_t num_rounds;
    int64_t bytes;
  };
  const int64_t own = rounds.rank();
  TORCH_CHECK(input_bytes[own] == output_bytes[own], "fastsync: all_to_all: rank ", own, " sends itself ",
              input_bytes[own], " bytes, but expects ", output_bytes[own]);
  copy_bytes(outputs[own], inputs[own], input_bytes[own]);
  const int64_t stride = share_of_place(rounds);
  const auto share = stride - static_cast<int64_t>(sizeof(Header));
  int64_t most = 0;
  for (int64_t rank = 0; rank < rounds.size(); ++rank) {
    most = rank == own ? most : std::max(most, input_bytes[rank]);
  }
  const int64_t own_rounds = (most + share - 1) / share;
  int64_t num_rounds = 1;
  for (int64_t round = 0; round < num_rounds; ++round) {
    const int64_t offset = round * share;
    const auto length_of = [&](int64_t bytes) { return std::clamp<int64_t>(bytes - offset, 0, share); };
    std::byte* const place = rounds.writable();
    for (int64_t step = 1; step < rounds.size(); ++step) {
      const int64_t rank = (own + step) % rounds.size();
      std::byte* const piece = place + rank * stride;
      const Header header{own_rounds, input_bytes[rank]};
      std::memcpy(piece, &header, sizeof(header));
      copy_bytes(piece + sizeof(header), inputs[rank] + offset, length_of(input_bytes[rank]));
    }
    rounds.arrive();
    for (int64_t step = 1; step < rounds.size(); ++step) {
      const int64_t rank = (own + step) % rounds.size();
      const std::byte* const piece = rounds.readable(rank) + own * stride;
      Header header{};
      std::memcpy(&header, piece, sizeof(header));
      TORCH_CHECK(header.bytes == output_bytes[rank], "fastsync: all_to_all: rank ", rank, " sends ", header.bytes,
                  " bytes, but this rank expects ", output_bytes[rank]);
      num_rounds = std::max({num_rounds, own_rounds, header.num_rounds});
      copy_bytes(outputs[rank] + offset, piece + sizeof(header), length_of(output_bytes[rank]));
    }
  }
}

}  // namespace fastsync
