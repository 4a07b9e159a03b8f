#include "transport/regions.h"

#include <utility>

namespace fastsync {

int64_t Regions::take(int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  return std::exchange(used_, (used_ + bytes + kCacheLine - 1) / kCacheLine * kCacheLine);
}

// In shared memory what is sent is where it is received.
Exchange Regions::exchange(int64_t num_rows, int64_t length, int64_t stride) {
  if (!team_->shares_memory()) {
    const Rows to{take(2 * num_rows * stride), length, stride};
    return {to, {to.begin(num_rows), length, stride}, to};
  }
  const int64_t begin = take(num_rows * stride);
  const int64_t rank = team_->rank();
  return {{rank * region_ + begin, length, stride},
          {begin + rank * stride, length, region_},
          {begin, length, region_ + stride}};
}

Rows Regions::gather(int64_t length, int64_t stride) {
  if (!team_->shares_memory()) {
    return {take(team_->size() * stride), length, stride};
  }
  return {take(stride), length, region_};
}

Rows Regions::own(int64_t num_rows, int64_t length, int64_t stride) {
  const int64_t begin = take(num_rows * stride);
  return {team_->shares_memory() ? team_->rank() * region_ + begin : begin, length, stride};
}

Rows Regions::of_first(const Rows& own) const {
  const int64_t before = team_->shares_memory() ? team_->rank() * region_ : 0;
  return {own.offset - before, own.length, own.stride};
}

}  // namespace fastsync
