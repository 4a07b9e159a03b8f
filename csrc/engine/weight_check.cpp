#include "engine/weight_check.h"

#include <algorithm>
#include <map>
#include <set>

#include "engine/ranks_differ.h"
#include "passes/cuda_graphs.h"
#include "transport/agreement.h"

namespace fastsync {

namespace {

constexpr auto kMostSeconds = std::chrono::seconds(30);
// The sum with the number of a sample arrives after the next stamp was made.
constexpr size_t kMostSent = 2;

// Returns a whole number above 0 that float32 holds.
float as_number(const std::string& text) {
  constexpr uint64_t kMost = (1 << 24) - 1;
  return static_cast<float>(1 + fingerprint(text) % kMost);
}

}  // namespace

WeightCheck::WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
                         std::vector<std::string> names, std::string machine)
    : group_(std::move(group)),
      names_(std::move(names)),
      machine_(std::move(machine)),
      machine_number_(as_number(machine_)) {
  for (const at::Tensor& parameter : parameters) {
    ids_.emplace_back(parameter.getIntrusivePtr());
  }
}

bool WeightCheck::is_due(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_due_now(step);
}

bool WeightCheck::is_due_now(int64_t step) const {
  return step >= 0 && (newest_ < 0 || step / kEvery != newest_ / kEvery || (step == newest_ && pending_));
}

bool WeightCheck::note_update(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_due_now(step)) {
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
    pending_.reset();  // the steps since were rolled back
  }
  if (!pending_ || (pending_->is_on_its_way() && step < newest_ + kStepsOnTheWay)) {
    return {.machine = machine_number_};
  }
  const float sample = as_number(c10::str(newest_, "\n", machine_, "\n", pending_->which()));
  const std::string text = pending_->text();
  pending_.reset();
  sent_.emplace_back(sample, text);
  if (sent_.size() > kMostSent) {
    sent_.pop_front();
  }
  return {.sample = sample, .weights = as_number(text), .machine = machine_number_};
}

void WeightCheck::arrive(const std::vector<Numbers>& numbers, int64_t engine, int64_t step) {
  const bool has_samples = std::ranges::any_of(numbers, [](const Numbers& each) { return each.sample != 0.0F; });
  const bool are_alike = std::ranges::all_of(
      numbers, [this](const Numbers& each) { return each.machine == machine_number_ || each.machine == 0.0F; });
  if (!has_samples && are_alike) {
    return;  // as in almost all steps
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!has_warned_of_machines_) {
    warn_of_machines(numbers, c10::str("fastsync/machines/", engine, "/", step));
  }
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
  const auto& ranks = parted->second.first;
  const auto own = std::ranges::find(sent_, parted->first, &std::pair<float, std::string>::first);
  const std::string old_key = std::exchange(key_, c10::str("fastsync/weights/", engine, "/", step));
  const auto difference =
      find_difference(group_, ranks, key_, names_, own == sent_.end() ? "" : own->second, kMostSeconds, old_key);
  if (difference && difference->is_rounding) {
    if (!std::exchange(has_warned_of_rounding_, true) && ranks.front() == group_->getRank()) {
      TORCH_WARN("fastsync: the weights of the ranks differ by what looks like roundings, and may part slowly: the ",
                 "first parameter that differs is ", difference->what, ". Restore weights by copying them back, and ",
                 "not by taking away what was added. Or call fastsync.sync_weights(model) now and then, on every rank");
    }
    return;
  }
  throw RanksDifferError(c10::str(
      "fastsync: the ranks hold different weights: ",
      difference && !difference->what.empty() ? "the first parameter that differs is " + difference->what
                                              : "the store of their group does not tell which",
      ". They were found by step ", step, ", and go on parting, whatever gradients they average. Usual causes: a rank ",
      "stepped another optimizer, or none. A backward past the averaging added gradients of its own rank. The ",
      "optimizer keeps copies of the weights that it took before they were made equal. A parameter was changed in ",
      "place with other data on each rank, as a forward of nn.Embedding(max_norm=) does. A state was not shared, such ",
      "as that of an optimizer which only one rank has loaded. Or the weights are meant to differ: then pass ",
      "check_weights=False. Else mend the cause, and give all ranks the weights and the states of one"));
}

// All ranks see it in the same step, and tell in the store what they are. The first one reads it.
void WeightCheck::warn_of_machines(const std::vector<Numbers>& numbers, const std::string& key) {
  std::vector<int64_t> ranks;
  std::set<float> machines;
  for (size_t rank = 0; rank < numbers.size(); ++rank) {
    if (numbers[rank].machine != 0.0F) {
      ranks.push_back(static_cast<int64_t>(rank));
      machines.insert(numbers[rank].machine);
    }
  }
  if (machines.size() <= 1) {
    return;
  }
  has_warned_of_machines_ = true;
  const bool warns = ranks.front() == group_->getRank();
  const auto texts = tell_in_store(group_, ranks, key, machine_, warns ? kMostSeconds : std::chrono::seconds(0));
  if (warns) {
    TORCH_WARN("fastsync: the ranks compute on unlike machines, which may round in other ways, so their weights may ",
               "part slowly, and only those of like machines are compared: ",
               texts ? who_has(ranks, *texts) : "the store of their group does not tell which",
               ". Call fastsync.sync_weights(model) now and then, on every rank");
  }
}

}  // namespace fastsync
