#include "engine/weight_check.h"

#include <algorithm>
#include <map>
#include <set>

#include "passes/graph_memory.h"
#include "transport/agreement.h"

namespace fastsync {

namespace {

constexpr auto kMostSeconds = std::chrono::seconds(5);
// The sum with the number of a sample arrives after the next stamp was made.
constexpr size_t kMostSent = 2;

// Returns a whole number above 0 that float32 holds.
float number_of(const std::string& text) {
  constexpr uint64_t kMost = (1 << 24) - 1;
  return static_cast<float>(1 + fingerprint(text) % kMost);
}

}  // namespace

WeightCheck::WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
                         std::vector<std::string> names)
    : group_(std::move(group)), names_(std::move(names)) {
  for (const at::Tensor& parameter : parameters) {
    ids_.emplace_back(parameter.getIntrusivePtr());
  }
}

bool WeightCheck::note_update(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_due = newest_ < 0 || step / kEvery != newest_ / kEvery;
  if (step < 0 || (!is_due && (step != newest_ || !pending_))) {
    return false;
  }
  std::vector<at::Tensor> trained;
  for (const ParameterId& id : ids_) {
    const at::Tensor parameter(id.lock());
    trained.push_back(parameter.defined() && parameter.requires_grad() ? parameter : at::Tensor());
    if (parameter.defined() && is_capturing(parameter.device())) {
      return false;
    }
  }
  newest_ = step;
  pending_.emplace(trained, static_cast<uint64_t>(step));
  return true;
}

WeightCheck::Numbers WeightCheck::numbers(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (step <= newest_) {
    pending_.reset();  // the steps since were taken back
  }
  if (!pending_ || (pending_->is_on_its_way() && step < newest_ + kStepsOnTheWay)) {
    return {};
  }
  const float sample = number_of(c10::str(newest_, "\n", pending_->which()));
  const std::vector<uint64_t> digests = pending_->digests();
  pending_.reset();
  sent_.emplace_back(sample, digests);
  if (sent_.size() > kMostSent) {
    sent_.pop_front();
  }
  return {sample, number_of({reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof(uint64_t)})};
}

void WeightCheck::arrive(const std::vector<Numbers>& numbers, int64_t engine, int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<float, std::pair<std::vector<int64_t>, std::set<float>>> found;  // ranks and numbers, by what a sample is of
  for (size_t rank = 0; rank < numbers.size(); ++rank) {
    auto& [ranks, weights] = found[numbers[rank].sample];
    ranks.push_back(static_cast<int64_t>(rank));
    weights.insert(numbers[rank].weights);
  }
  found.erase(0.0F);
  const auto parted = std::ranges::find_if(found, [](const auto& each) { return each.second.second.size() > 1; });
  if (parted == found.end()) {
    return;
  }
  const auto own = std::ranges::find(sent_, parted->first, &std::pair<float, std::vector<uint64_t>>::first);
  const auto difference =
      find_difference(group_, parted->second.first, c10::str("fastsync/weights/", engine, "/", step), names_,
                      own == sent_.end() ? std::vector<uint64_t>() : own->second, kMostSeconds);
  TORCH_CHECK(
      false, "fastsync: the ranks hold different weights: ",
      difference && !difference->empty() ? "the first parameter that differs is " + *difference
                                         : "the store of their group does not tell which",
      ". They were found by step ", step, ", and go on parting, whatever gradients they average. Four causes are ",
      "usual. A rank stepped another optimizer, or none. The optimizer keeps copies of the weights that it took before ",
      "they were made equal. A parameter was changed in place with other data on each rank. Or a state was not shared, ",
      "such as that of an optimizer which only one rank has loaded. Give all ranks the weights and the states of one. ",
      "Where weights are meant to differ, pass check_weights=False");
}

}  // namespace fastsync
