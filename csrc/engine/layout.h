// A layout tells which parameter's gradient travels in which bucket. All ranks have the same layout.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/bucket.h"

namespace fastsync {

struct LayoutBucket {
  std::vector<size_t> parameters;  // indices of parameters
  int64_t num_reals = 0;
  std::shared_ptr<Bucket> bucket = nullptr;  // set by the engine
};

// A layout holds until a parameter is frozen, unfrozen, moved, cast or put in another order in memory. The buckets come
// in the order in which they are sent.
class Layout {
 public:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  // A layout that is not made yet.
  Layout() = default;
  // Takes the tensors of all parameters, and the indices of those in each bucket.
  Layout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<size_t>> buckets);

  bool is_made() const { return !buckets.empty(); }
  // The bucket of a parameter; kNone if it was frozen, or has no values.
  size_t bucket_of(size_t parameter) const { return is_made() ? slots_[parameter].bucket : kNone; }
  // The index of the parameter's flag among the side values. Each parameter of a bucket has a flag.
  size_t flag_of(size_t parameter) const { return slots_[parameter].flag; }
  size_t num_flags() const { return num_flags_; }
  // Describes how the parameter has changed since the layout was made; empty if it has not.
  std::string change(size_t index, const at::Tensor& parameter, const std::string& name) const;

  std::vector<LayoutBucket> buckets;

 private:
  struct Slot {
    size_t bucket = kNone;
    size_t flag = 0;
    std::vector<int64_t> sizes = {};
    std::vector<int64_t> strides = {};
    at::ScalarType dtype = at::kFloat;  // the dtype of gradients
    c10::Device device = c10::kCPU;
  };

  std::vector<Slot> slots_;  // by parameter
  size_t num_flags_ = 0;
};

// Returns the order of the group's rank 0 on every rank. All orders have the same length. Waits for the ranks.
std::vector<size_t> order_of_rank_0(c10d::ProcessGroup& group, const std::vector<size_t>& order, c10::Device device);

// Assigns the parameters to buckets. Their indices come in this order. Returns the indices of each bucket.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                const std::vector<size_t>& order, int64_t bucket_cap_bytes);

}  // namespace fastsync
