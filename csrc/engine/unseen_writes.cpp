#include "engine/unseen_writes.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

namespace fastsync {

namespace {

constexpr int64_t kMostSampled = 16;

// Joins samples to bytes on their device. Undefined if there are none.
at::Tensor join(const std::vector<at::Tensor>& samples) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& sample : samples) {
    if (sample.defined() && sample.numel() > 0) {
      parts.push_back(sample.view(at::kByte));
    }
  }
  return parts.empty() ? at::Tensor() : at::cat(parts);
}

std::vector<char> bytes_of(const std::vector<at::Tensor>& samples) {
  const at::Tensor joined = join(samples);
  if (!joined.defined()) {
    return {};
  }
  const at::Tensor on_host = joined.cpu();
  const auto* const first = on_host.const_data_ptr<uint8_t>();
  return {first, first + on_host.numel()};
}

}  // namespace

at::Tensor sample_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) {
    return {};
  }
  const at::Tensor values = tensor.detach();
  const int64_t numel = values.numel();
  const at::Tensor flat =
      values.is_non_overlapping_and_dense() ? values.as_strided({numel}, {1}) : values.reshape({numel});
  const int64_t step = (numel / kMostSampled) | 1;  // odd, or all would be of one column of a matrix
  if (!flat.is_cpu()) {
    return flat.slice(0, 0, numel, step).clone();
  }
  const at::Tensor sample = at::empty({(numel + step - 1) / step}, flat.options());
  const auto size = static_cast<int64_t>(flat.element_size());
  const auto* const from = static_cast<const char*>(flat.const_data_ptr());
  auto* const to = static_cast<char*>(sample.mutable_data_ptr());
  for (int64_t i = 0; i < sample.numel(); ++i) {
    std::memcpy(to + i * size, from + i * step * size, size);
  }
  return sample;
}

std::vector<bool> differ(const std::vector<at::Tensor>& noted, const std::vector<at::Tensor>& current) {
  const auto length = [](const at::Tensor& sample) { return sample.defined() ? sample.nbytes() : 0; };
  std::vector<at::Tensor> kept;  // those noted, and then the current ones
  std::vector<at::Tensor> kept_now;
  std::vector<bool> all;
  for (size_t i = 0; i < noted.size(); ++i) {
    all.push_back(length(noted[i]) != length(current[i]));
    if (!all.back()) {
      kept.push_back(noted[i]);
      kept_now.push_back(current[i]);
    }
  }
  kept.insert(kept.end(), kept_now.begin(), kept_now.end());
  const std::vector<char> bytes = bytes_of(kept);
  auto then = bytes.begin();
  auto now = then + static_cast<std::ptrdiff_t>(bytes.size() / 2);
  for (size_t i = 0; i < noted.size(); ++i) {
    if (all[i]) {
      continue;
    }
    const auto size = static_cast<std::ptrdiff_t>(length(noted[i]));
    all[i] = !std::equal(then, then + size, now);
    then += size;
    now += size;
  }
  return all;
}

at::Tensor bytes_that_differ(const std::vector<at::Tensor>& noted, const std::vector<at::Tensor>& current) {
  const at::Tensor then = join(noted);
  return then.defined() ? then.ne(join(current)) : at::Tensor();
}

}  // namespace fastsync
