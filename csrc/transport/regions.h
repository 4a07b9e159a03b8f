// Where the rows of a sum lie in the buffer of a team. Each member fills a region of its own, of equal bytes, so that
// its memory can lie near it. Where members share memory all regions are there, one after the other; else this rank's
// alone, with room for what others send.
#pragma once

#include <cstdint>

#include "transport/team.h"

namespace fastsync {

// Of an all_to_all: the rows that leave, those that come, by member, and those of an all_gather that may take the place
// of what has left, or of what has been read.
struct Exchange {
  Rows to;
  Rows from;
  Rows gathered;
};

// Hands out one place after the other, the same ones on every member.
class Regions {
 public:
  // As rows lie a region apart, its size comes first: see RankSum::place.
  Regions(const Team& team, int64_t region) : team_(&team), region_(region) {}

  int64_t used() const { return used_; }

  // Rows for the first num_rows members.
  Exchange exchange(int64_t num_rows, int64_t length, int64_t stride);
  // A row of each member's, which all get.
  Rows gather(int64_t length, int64_t stride);
  // Rows that this member alone fills.
  Rows own(int64_t num_rows, int64_t length, int64_t stride);
  // The first member's such rows, if they can be seen, else this one's.
  Rows of_first(const Rows& own) const;

 private:
  int64_t take(int64_t bytes);

  const Team* team_;
  int64_t region_;
  int64_t used_ = 0;
};

}  // namespace fastsync
