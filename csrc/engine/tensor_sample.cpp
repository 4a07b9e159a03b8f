#include "engine/tensor_sample.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <thread>

#include "transport/agreement.h"
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
  return tensor.storage().nbytes() >= at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                                       tensor.itemsize(), tensor.storage_offset());
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

// Describes which ranks have the same text, as in "rank 0, 2; rank 1". Empty if all have.
std::string who_differs(const std::vector<int64_t>& ranks, const std::vector<std::string>& texts) {
  std::map<std::string, std::string> ranks_of;  // by text
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::string& same = ranks_of[texts[i]];
    same += (same.empty() ? "rank " : ", ") + std::to_string(ranks[i]);
  }
  std::vector<std::string> groups;
  std::ranges::transform(ranks_of, std::back_inserter(groups), [](const auto& each) { return each.second; });
  std::ranges::sort(groups);
  return groups.size() <= 1 ? "" : c10::Join("; ", groups);
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
    if (values.is_cpu()) {
      values_[i] = bytes_of(values);
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

std::vector<uint64_t> TensorSample::digests() {
  for (const c10::Event& event : have_come_) {
    if (!event.query()) {
      event.synchronize();
    }
  }
  for (const auto& [index, values] : std::exchange(on_their_way_, {})) {
    values_[index] = bytes_of(values);
  }
  std::vector<uint64_t> digests;
  std::ranges::transform(values_, std::back_inserter(digests), fingerprint);
  return digests;
}

// Each rank writes what it has under a key of its own, and reads that of all.
std::optional<std::string> find_difference(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                           const std::vector<int64_t>& ranks, const std::string& key,
                                           const std::vector<std::string>& names, const std::vector<uint64_t>& own,
                                           std::chrono::seconds limit) {
  if (!StoreConnection::can_use(group->getStore())) {
    return std::nullopt;
  }
  constexpr size_t kSize = sizeof(uint64_t);
  std::vector<std::string> keys;
  std::ranges::transform(ranks, std::back_inserter(keys), [&](int64_t rank) { return c10::str(key, "/", rank); });
  std::vector<std::string> texts;
  try {
    const StoreConnection connection(group->getStore());
    if (!own.empty()) {
      const auto* const data = reinterpret_cast<const uint8_t*>(own.data());
      connection.store()->set(c10::str(key, "/", group->getRank()),
                              std::vector<uint8_t>(data, data + own.size() * kSize));
    }
    const auto until = steady_clock::now() + limit;
    while (true) {
      texts = connection.get(keys);
      if (std::ranges::all_of(texts, [&](const std::string& text) { return text.size() == names.size() * kSize; })) {
        break;
      }
      if (steady_clock::now() >= until) {
        return std::nullopt;
      }
      std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  for (size_t i = 0; i < names.size(); ++i) {
    std::vector<std::string> digests;
    std::ranges::transform(texts, std::back_inserter(digests),
                           [&](const std::string& text) { return text.substr(i * kSize, kSize); });
    if (const std::string who = who_differs(ranks, digests); !who.empty()) {
      return c10::str(names[i], ", and these have the same values: ", who);
    }
  }
  return "";
}

}  // namespace fastsync
