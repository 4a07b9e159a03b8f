#include "engine/bucket_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace fastsync {

std::vector<std::vector<int64_t>> lay_out_buckets(const std::vector<ParameterSize>& sizes,
                                                  const std::vector<int64_t>& order, int64_t cap_bytes) {
  struct Bucket {
    std::vector<int64_t> parameters;
    int64_t bytes = 0;
    int64_t last_place = 0;
  };
  const int64_t all_bytes = std::accumulate(order.begin(), order.end(), int64_t{0},
                                            [&](int64_t sum, int64_t index) { return sum + sizes[index].bytes; });
  const int64_t first_cap_bytes = all_bytes > cap_bytes ? std::min(cap_bytes, kFirstBucketBytes) : cap_bytes;
  std::vector<Bucket> closed;
  std::map<int64_t, Bucket> open;  // by kind
  for (int64_t place = 0; place < static_cast<int64_t>(order.size()); ++place) {
    const ParameterSize& size = sizes[order[place]];
    Bucket& bucket = open[size.kind];
    bucket.parameters.push_back(order[place]);
    bucket.bytes += size.bytes;
    bucket.last_place = place;
    if (bucket.bytes >= (closed.empty() ? first_cap_bytes : cap_bytes)) {
      closed.push_back(std::move(bucket));
      open.erase(size.kind);
    }
  }
  for (auto& [kind, bucket] : open) {
    closed.push_back(std::move(bucket));
  }
  std::sort(closed.begin(), closed.end(), [](const Bucket& a, const Bucket& b) { return a.last_place < b.last_place; });
  std::vector<std::vector<int64_t>> layout;
  for (Bucket& bucket : closed) {
    layout.push_back(std::move(bucket.parameters));
  }
  return layout;
}

}  // namespace fastsync
