#include "engine/tensor_sample.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "transport/agreement.h"
#include "transport/per_group.h"
#include "transport/store_connection.h"

namespace fastsync {

namespace {

using std::chrono::steady_clock;

constexpr int64_t kMostValues = 64;  // of each tensor
constexpr auto kPause = std::chrono::milliseconds(10);

// SplitMix64 (Steele, Lea, Flood, 2014).
uint64_t random_of(uint64_t seed) {
  seed += 0x9E3779B97F4A7C15ULL;
  seed = (seed ^ (seed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  seed = (seed ^ (seed >> 27U)) * 0x94D049BB133111EBULL;
  return seed ^ (seed >> 31U);
}

bool has_its_memory(const at::Tensor& tensor) {
  return tensor.storage().nbytes() >=
         at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
}

bool can_be_read(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 && tensor.layout() == at::kStrided && !tensor.is_meta() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         tensor.has_storage() && has_its_memory(tensor);
}

at::Tensor some_values(const at::Tensor& tensor, uint64_t seed) {
  const at::Tensor flat = tensor.detach().reshape({-1});
  const int64_t numel = flat.numel();
  const int64_t count = std::min(numel, kMostValues);
  const int64_t stride = numel / count;
  const auto begin = static_cast<int64_t>(random_of(seed) % static_cast<uint64_t>(numel - (count - 1) * stride));
  return flat.as_strided({count}, {stride}, flat.storage_offset() + begin);
}

std::string bytes_of(const at::Tensor& values) {
  const auto size = static_cast<size_t>(values.itemsize());
  const auto stride = static_cast<size_t>(values.stride(0)) * size;
  const auto* const data = static_cast<const char*>(values.const_data_ptr());
  std::string bytes;
  bytes.reserve(size * static_cast<size_t>(values.numel()));
  for (int64_t i = 0; i < values.numel(); ++i) {
    bytes.append(data + static_cast<size_t>(i) * stride, size);
  }
  return bytes;
}

// How far equal values may part by roundings, such as those of adding a number and taking it away again, relative to
// the largest of them. A training whose ranks have parted by a fault gets beyond that.
double tolerance_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
      return 1e-4;
    case at::kHalf:
      return 0x1p-8;  // four roundings
    case at::kBFloat16:
      return 0x1p-5;
    default:
      return 0.0;
  }
}

bool are_equal(const SampledValues& one, const SampledValues& other) { return one.bytes == other.bytes; }

bool are_close(const SampledValues& one, const SampledValues& other) {
  const double tolerance = tolerance_of(one.dtype);
  if (are_equal(one, other) || tolerance == 0.0 || one.dtype != other.dtype || one.bytes.size() != other.bytes.size()) {
    return are_equal(one, other);
  }
  const auto values_of = [](const SampledValues& values) {
    const auto numel = static_cast<int64_t>(values.bytes.size() / c10::elementSize(values.dtype));
    return at::from_blob(const_cast<char*>(values.bytes.data()), {numel}, at::TensorOptions().dtype(values.dtype))
        .to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  };
  const at::Tensor first = values_of(one);
  const double most = (first - values_of(other)).abs().max().item<double>();
  return most <= tolerance * first.abs().max().item<double>();  // false if one is not finite
}

// The rows of each rank, one for each tensor. Empty if the text has another number of them.
std::vector<SampledValues> parse(const std::string& text, size_t num_tensors) {
  std::vector<SampledValues> all;
  size_t at = 0;
  while (at + 1 + sizeof(uint64_t) <= text.size()) {
    uint64_t size = 0;
    std::memcpy(&size, &text[at + 1], sizeof(size));
    const auto dtype = static_cast<at::ScalarType>(text[at]);
    at += 1 + sizeof(size);
    if (size > text.size() - at) {
      return {};
    }
    all.push_back({dtype, text.substr(at, size)});
    at += size;
  }
  return all.size() == num_tensors ? all : std::vector<SampledValues>();
}

std::string joined(std::vector<std::string> groups) {
  std::ranges::sort(groups);
  return c10::Join("; ", groups);
}

// Describes which ranks have the same values of a tensor. Empty if all have.
std::string who_differs(const std::vector<int64_t>& ranks, const std::vector<std::vector<SampledValues>>& samples,
                        size_t tensor, bool (*are_same)(const SampledValues&, const SampledValues&)) {
  std::vector<std::pair<size_t, std::string>> groups;  // the first of each, and its ranks
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto same = std::ranges::find_if(
        groups, [&](const auto& group) { return are_same(samples[group.first][tensor], samples[i][tensor]); });
    if (same == groups.end()) {
      groups.emplace_back(i, c10::str("rank ", ranks[i]));
    } else {
      same->second += c10::str(", ", ranks[i]);
    }
  }
  std::vector<std::string> texts;
  std::ranges::transform(groups, std::back_inserter(texts), [](const auto& group) { return group.second; });
  return texts.size() <= 1 ? "" : joined(texts);
}

}  // namespace

TensorSample::TensorSample(const std::vector<at::Tensor>& tensors, uint64_t seed) : values_(tensors.size()) {
  const at::NoGradGuard no_grad;
  // By device and dtype, because one copy takes all of them.
  std::map<std::string, std::pair<std::vector<size_t>, std::vector<at::Tensor>>> on_devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool is_in = can_be_read(tensors[i]);
    which_ += is_in ? '1' : '0';
    if (!is_in) {
      continue;
    }
    const at::Tensor values = some_values(tensors[i], seed * tensors.size() + i);
    values_[i].dtype = values.scalar_type();
    if (values.is_cpu()) {
      values_[i].bytes = bytes_of(values);
    } else {
      auto& [indices, parts] = on_devices[c10::str(values.device(), values.scalar_type())];
      indices.push_back(i);
      parts.push_back(values);
    }
  }
  for (const auto& [key, each] : on_devices) {
    const auto& [indices, parts] = each;
    const at::Tensor all = at::cat(parts);
    const c10::Device device = all.device();
    const at::Tensor host = at::empty(all.sizes(), all.options().device(at::kCPU).pinned_memory(true));
    host.copy_(all, /*non_blocking=*/true);
    c10::Event& has_come = have_come_.emplace_back(device.type());
    has_come.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    int64_t begin = 0;
    for (size_t i = 0; i < indices.size(); ++i) {
      on_their_way_.emplace_back(indices[i], host.narrow(0, begin, parts[i].numel()));
      begin += parts[i].numel();
    }
  }
}

std::string TensorSample::text() {
  for (const c10::Event& event : have_come_) {
    if (!event.query()) {
      event.synchronize();
    }
  }
  for (const auto& [index, values] : std::exchange(on_their_way_, {})) {
    values_[index].bytes = bytes_of(values);
  }
  std::string text;
  for (const SampledValues& values : values_) {
    const uint64_t size = values.bytes.size();
    text += static_cast<char>(values.dtype);
    text.append(reinterpret_cast<const char*>(&size), sizeof(size));
    text += values.bytes;
  }
  return text;
}

// Each rank writes what it has under a key of its own, and reads that of all.
std::optional<std::vector<std::string>> tell_in_store(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const std::vector<int64_t>& ranks, const std::string& key,
                                                      const std::string& own, std::chrono::seconds limit,
                                                      const std::string& old_key) {
  if (!StoreConnection::can_use(group->getStore())) {
    return std::nullopt;
  }
  const auto key_of = [](const std::string& beginning, int64_t rank) { return c10::str(beginning, "/", rank); };
  std::vector<std::string> keys;
  std::ranges::transform(ranks, std::back_inserter(keys), [&](int64_t rank) { return key_of(key, rank); });
  try {
    const StoreConnection connection(group->getStore());
    if (!own.empty()) {
      connection.store()->set(key_of(key, group->getRank()), std::vector<uint8_t>(own.begin(), own.end()));
    }
    const auto until = steady_clock::now() + limit;
    while (true) {
      const std::vector<std::string> texts = connection.get(keys);
      if (std::ranges::none_of(texts, &std::string::empty)) {
        if (!old_key.empty()) {
          connection.store()->deleteKey(key_of(old_key, group->getRank()));
        }
        return texts;
      }
      if (steady_clock::now() >= until) {
        return std::nullopt;
      }
      std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string who_has(const std::vector<int64_t>& ranks, const std::vector<std::string>& texts) {
  std::map<std::string, std::string> ranks_of;
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::string& same = ranks_of[texts[i]];
    same += (same.empty() ? "rank " : ", ") + std::to_string(ranks[i]);
  }
  std::vector<std::string> groups;
  for (const auto& [text, who] : ranks_of) {
    groups.push_back(c10::str(who, ": ", text));
  }
  return joined(groups);
}

std::optional<SampleDifference> find_difference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                const std::vector<int64_t>& ranks, const std::string& key,
                                                const std::vector<std::string>& names, const std::string& own,
                                                std::chrono::seconds limit, const std::string& old_key) {
  const auto texts = tell_in_store(group, ranks, key, own, limit, old_key);
  if (!texts) {
    return std::nullopt;
  }
  std::vector<std::vector<SampledValues>> samples;
  for (const std::string& text : *texts) {
    samples.push_back(parse(text, names.size()));
    if (samples.back().empty()) {
      return std::nullopt;
    }
  }
  for (const auto are_same : {are_close, are_equal}) {
    for (size_t i = 0; i < names.size(); ++i) {
      if (const std::string who = who_differs(ranks, samples, i, are_same); !who.empty()) {
        return SampleDifference{c10::str(names[i], ", and these have the same values: ", who), are_same == are_equal};
      }
    }
  }
  return SampleDifference{};
}

std::optional<std::string> compare_gradients(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             const std::vector<at::Tensor>& parameters,
                                             const std::vector<std::string>& names) {
  constexpr auto kLongest = std::chrono::seconds(30);
  static std::mutex mutex;
  static PerGroup<int64_t> counts;
  const int64_t number = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return counts[group]++;
  }();
  const auto key_of = [](int64_t each) { return c10::str("fastsync/gradients/", each); };
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    gradients.push_back(gradient.defined() && gradient.is_sparse() ? gradient.coalesce()._values() : gradient);
  }
  std::vector<int64_t> ranks(static_cast<size_t>(group->getSize()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto difference = find_difference(group, ranks, key_of(number), names, TensorSample(gradients, number).text(),
                                          kLongest, number == 0 ? "" : key_of(number - 1));
  return difference ? std::optional(difference->is_rounding ? "" : difference->what) : std::nullopt;
}

}  // namespace fastsync
