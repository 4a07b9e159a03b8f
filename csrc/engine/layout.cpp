#include "engine/layout.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include "engine/parameter.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

// Makes a tensor with as many values as are sent for the parameter, and their dtype, in almost no memory.
at::Tensor outline_of(const at::Tensor& parameter) {
  return at::empty({1}, parameter.options().dtype(real_dtype_of(parameter))).expand({num_reals_of(parameter)});
}

}  // namespace

Layout::Layout(const std::vector<at::Tensor>& parameters, std::vector<std::vector<size_t>> assigned)
    : slots_(parameters.size()) {
  for (auto& indices : assigned) {
    LayoutBucket bucket;
    for (const size_t index : indices) {
      const at::Tensor& parameter = parameters[index];
      slots_[index] = {.bucket = buckets.size(),
                       .flag = num_flags_++,
                       .sizes = parameter.sizes().vec(),
                       .strides = parameter.strides().vec(),
                       .dtype = grad_dtype_of(parameter),
                       .device = parameter.device()};
      bucket.num_reals += num_reals_of(parameter);
    }
    bucket.parameters = std::move(indices);
    buckets.push_back(std::move(bucket));
  }
}

std::string Layout::change(size_t index, const at::Tensor& parameter, const std::string& name) const {
  const Slot& slot = slots_[index];
  const bool is_in_bucket = slot.bucket != kNone;
  if (takes_part(parameter) != is_in_bucket) {
    return c10::str("parameter ", name, is_in_bucket ? " was frozen" : " was unfrozen");
  }
  if (is_in_bucket && (parameter.sizes() != slot.sizes || grad_dtype_of(parameter) != slot.dtype ||
                       parameter.device() != slot.device)) {
    return c10::str("parameter ", name, " became another tensor");
  }
  if (is_in_bucket && parameter.strides() != slot.strides) {
    return c10::str("parameter ", name, " lies in memory in another order, as after to(memory_format=...)");
  }
  return "";
}

std::vector<size_t> order_of_rank_0(c10d::ProcessGroup& group, const std::vector<size_t>& order, c10::Device device) {
  const WithoutPythonObjects without_python;
  const std::vector<int64_t> indices(order.begin(), order.end());
  std::vector<at::Tensor> tensors{at::tensor(at::ArrayRef<int64_t>(indices)).to(device)};
  group.broadcast(tensors)->wait();
  const at::Tensor on_host = tensors.front().cpu();
  return {on_host.data_ptr<int64_t>(), on_host.data_ptr<int64_t>() + on_host.numel()};
}

// If there are several buckets, the first one is smaller, as DDP's is: until it is full, the network has nothing to do.
// Buckets come in the order in which their last parameters do, so that the bucket that is ready first is sent first.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<at::Tensor>& parameters,
                                                const std::vector<size_t>& order, int64_t bucket_cap_bytes) {
  if (order.empty()) {
    return {};
  }
  std::vector<at::Tensor> outlines;
  size_t bytes = 0;
  for (const size_t index : order) {
    outlines.push_back(outline_of(parameters[index]));
    bytes += outlines.back().nbytes();
  }
  const auto cap = static_cast<size_t>(bucket_cap_bytes);
  std::vector<size_t> caps{cap};
  if (bytes > cap) {
    caps.insert(caps.begin(), std::min<size_t>(cap, c10d::kDefaultFirstBucketBytes));
  }
  std::vector<int64_t> positions(order.size());  // keep torch from putting the buckets in another order
  std::iota(positions.begin(), positions.end(), 0);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(outlines, caps, {}, positions));
  std::sort(buckets.begin(), buckets.end(), [](const auto& a, const auto& b) { return a.back() < b.back(); });
  for (auto& bucket : buckets) {
    std::transform(bucket.begin(), bucket.end(), bucket.begin(), [&](size_t position) { return order[position]; });
  }
  return buckets;
}

}  // namespace fastsync
