#include "engine/weight_check.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "transport/agreement.h"
#include "transport/store_connection.h"

namespace fastsync {

namespace {

using std::chrono::steady_clock;

constexpr int64_t kMostValues = 64;  // of each parameter
constexpr auto kMostSeconds = std::chrono::seconds(5);
constexpr auto kPause = std::chrono::milliseconds(10);

// SplitMix64 (Steele, Lea, Flood, 2014).
uint64_t random_of(uint64_t seed) {
  seed += 0x9E3779B97F4A7C15ULL;
  seed = (seed ^ (seed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  seed = (seed ^ (seed >> 27U)) * 0x94D049BB133111EBULL;
  return seed ^ (seed >> 31U);
}

// Whether the parameter has values of its own that can be read here: none of a subclass, which Python computes.
bool is_plain(const at::Tensor& parameter) {
  return parameter.defined() && parameter.requires_grad() && parameter.numel() > 0 &&
         parameter.layout() == at::kStrided && !parameter.is_meta() && parameter.has_storage() &&
         !parameter.key_set().has(c10::DispatchKey::Python);
}

// Returns evenly spaced values of a tensor. Where they begin depends on the seed.
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

}  // namespace

WeightCheck::WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
                         std::vector<std::string> names)
    : group_(std::move(group)), names_(std::move(names)) {
  for (const at::Tensor& parameter : parameters) {
    ids_.emplace_back(parameter.getIntrusivePtr());
  }
}

void WeightCheck::note_update() {
  const std::lock_guard<std::mutex> lock(mutex_);
  was_updated_ = true;
}

float WeightCheck::number(int64_t step) {
  constexpr uint64_t kMost = (1 << 24) - 1;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!pending_) {
    const bool is_first = was_updated_ && !std::exchange(follows_update_, was_updated_);
    if (!is_first && step / kEvery <= newest_ / kEvery) {
      return 0.0F;
    }
    newest_ = step;
    pending_ = take(step);
    if (!pending_->on_their_way.empty()) {
      return 0.0F;
    }
  }
  digests_ = digests_of(std::move(*pending_));
  pending_.reset();
  const std::string all(reinterpret_cast<const char*>(digests_.data()), digests_.size() * sizeof(uint64_t));
  return static_cast<float>(1 + fingerprint(all) % kMost);
}

WeightCheck::Sample WeightCheck::take(int64_t step) const {
  const at::NoGradGuard no_grad;
  Sample sample;
  sample.values.resize(ids_.size());
  // By device and dtype, because one copy takes all of them.
  std::map<std::string, std::pair<std::vector<size_t>, std::vector<at::Tensor>>> on_devices;
  for (size_t i = 0; i < ids_.size(); ++i) {
    const at::Tensor parameter(ids_[i].lock());
    if (!is_plain(parameter)) {
      continue;
    }
    const at::Tensor values = some_values(parameter, static_cast<uint64_t>(step) * ids_.size() + i);
    if (values.is_cpu()) {
      sample.values[i] = bytes_of(values);
    } else {
      auto& [indices, tensors] = on_devices[c10::str(values.device(), values.scalar_type())];
      indices.push_back(i);
      tensors.push_back(values);
    }
  }
  for (const auto& [key, each] : on_devices) {
    const auto& [indices, tensors] = each;
    const at::Tensor all = at::cat(tensors);
    const c10::Device device = all.device();
    const at::Tensor host = at::empty(all.sizes(), all.options().device(at::kCPU).pinned_memory(true));
    host.copy_(all, /*non_blocking=*/true);
    c10::Event& has_come = sample.have_come.emplace_back(device.type());
    has_come.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    int64_t begin = 0;
    for (size_t i = 0; i < indices.size(); ++i) {
      sample.on_their_way.emplace_back(indices[i], host.narrow(0, begin, tensors[i].numel()));
      begin += tensors[i].numel();
    }
  }
  return sample;
}

std::vector<uint64_t> WeightCheck::digests_of(Sample sample) {
  for (const c10::Event& event : sample.have_come) {
    if (!event.query()) {  // it was recorded some steps ago
      event.synchronize();
    }
  }
  for (const auto& [index, values] : sample.on_their_way) {
    sample.values[index] = bytes_of(values);
  }
  std::vector<uint64_t> digests;
  std::ranges::transform(sample.values, std::back_inserter(digests), fingerprint);
  return digests;
}

void WeightCheck::arrive(const std::vector<float>& numbers, int64_t engine, int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<float> different(numbers.begin(), numbers.end());
  different.erase(0.0F);
  if (different.size() <= 1) {
    return;
  }
  TORCH_CHECK(
      false, "fastsync: the ranks hold different weights: ", difference(engine, step), ". They were found by step ",
      step, ", and go on parting, whatever gradients they average. Four causes are usual. A rank stepped another ",
      "optimizer, or none. The optimizer keeps copies of the weights that it took before they were made equal. A ",
      "parameter was changed in place with other data on each rank. Or a state was not shared, such as that ",
      "of an optimizer which only one rank has loaded. Give all ranks the weights and the states of one. ",
      "Where weights are meant to differ, pass check_weights=False");
}

// Returns the first parameter that differs, and which ranks have the same values of it. Each rank writes what it has
// under a key of its own. If a rank does not come, only the fact is told.
std::string WeightCheck::difference(int64_t engine, int64_t step) const {
  if (!StoreConnection::can_use(group_->getStore())) {
    return "they have no store to tell each other which";
  }
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < group_->getSize(); ++rank) {
    keys.push_back(c10::str("fastsync/weights/", engine, "/", step, "/", rank));
  }
  std::vector<std::string> texts;
  try {
    const StoreConnection connection(group_->getStore());
    const std::string own(reinterpret_cast<const char*>(digests_.data()), digests_.size() * sizeof(uint64_t));
    connection.store()->set(keys[static_cast<size_t>(group_->getRank())], std::vector<uint8_t>(own.begin(), own.end()));
    const auto until = steady_clock::now() + kMostSeconds;
    while (steady_clock::now() < until) {
      texts = connection.get(keys);
      if (std::ranges::none_of(texts, &std::string::empty)) {
        break;
      }
      std::this_thread::sleep_for(kPause);
    }
  } catch (const std::exception&) {
    return "the store of their group does not tell which";
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    std::map<std::string, std::string> ranks_of;  // by digest
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank].size() == digests_.size() * sizeof(uint64_t)) {
        std::string& ranks = ranks_of[texts[rank].substr(i * sizeof(uint64_t), sizeof(uint64_t))];
        ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
      }
    }
    if (ranks_of.size() > 1) {
      std::vector<std::string> groups;
      for (const auto& each : ranks_of) {
        groups.push_back(each.second);
      }
      std::ranges::sort(groups);
      std::string who;
      for (const std::string& each : groups) {
        who += (who.empty() ? "" : "; ") + each;
      }
      return c10::str("the first parameter that differs is ", names_[i], ", and these have the same values: ", who);
    }
  }
  return "the store of their group does not tell which";
}

}  // namespace fastsync
