// How a bucket is sent in one step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "engine/compression.h"
#include "sums/planned_sum.h"
#include "transport/shard_group.h"
#include "transport/shared_team.h"
#include "transport/teams.h"

namespace fastsync {

constexpr int kTagsPerBucket = 4;

// Returns the first tag of an engine's buckets, from a number that its ranks have agreed on. It is far from the tags
// that people choose. There is room for kMaxBuckets before the tags of another engine begin.
constexpr int64_t kMaxBuckets = (1 << 14) / kTagsPerBucket;
inline int first_tag(int64_t number) {
  return static_cast<int>(1 << 30 | (number % (1 << 16)) * kMaxBuckets * kTagsPerBucket);
}

// All members but the weight and has_failed are the same on all ranks.
struct SendOptions {
  // Tells where a reduce-scatter takes place. Several buckets share its teams and, on a CPU, its memory, one after the
  // other. On a device the memory is null. There each bucket keeps a plan of its own, and its buffer only for one sum.
  struct Scatter {
    at::Tensor output;  // becomes this rank's shard of the sum, times the factor
    double factor;
    Teams& teams;
    SumMemory* memory;
  };

  Compression compression;
  int64_t step = 0;
  int tag = 0;                         // the first of its messages' kTagsPerBucket tags
  SumNumber number = {};               // its steps are whole ones, because a step may have two sums
  bool is_weighted_mean = false;       // whether ranks have weights, and the result is a mean
  at::Tensor weight = {};              // see FlatGradients
  bool in_place = false;               // whether nobody else uses the gradients' memory until the sum is there
  const Scatter* scatter = nullptr;    // null for an all-reduce
  const ShardGroup* shards = nullptr;  // if set, the gradients stay what they are, and Bucket::shard takes the means
  bool may_be_rolled_back = false;     // see Bucket::roll_back
  bool has_failed = false;             // whether this rank sends nan in place of gradients
  bool needs_stats = true;             // whether somebody may ask for the statistics of the means

  bool may_share_memory() const { return shards == nullptr || shards->shares_memory(); }
};

}  // namespace fastsync
