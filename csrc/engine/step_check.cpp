#include "engine/step_check.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "engine/ranks_differ.h"
#include "passes/cuda_graphs.h"
#include "transport/agreement.h"

namespace fastsync {

namespace {

bool is_turned_off() {
  const char* const setting = std::getenv("FASTSYNC_STEP_CHECK");
  return setting != nullptr && std::string(setting) == "0";
}

// Returns one number for a gradient's first values, in which each value is weighted by its index. If the gradient is
// sparse, its rows may be all that tells it from another rank's.
at::Tensor number_of(const at::Tensor& gradient) {
  constexpr int64_t kMost = 1 << 16;
  if (gradient.is_sparse()) {
    const at::Tensor coalesced = gradient.coalesce();
    return number_of(coalesced._values()).mul(number_of(coalesced._indices()).add(1));
  }
  const at::Tensor first = gradient.reshape({-1}).narrow(0, 0, std::min(gradient.numel(), kMost)).cpu().to(at::kDouble);
  return first.dot(at::arange(1, first.numel() + 1, first.options()));
}

// Returns a whole number that float32 holds. It is 0 if all gradients are zeros, or if one is not finite.
float fingerprint_of(at::TensorList gradients) {
  constexpr uint64_t kMost = (1 << 24) - 1;
  std::vector<at::Tensor> numbers{at::zeros({}, at::kDouble)};
  std::transform(gradients.begin(), gradients.end(), std::back_inserter(numbers), number_of);
  const at::Tensor all = at::stack(numbers);
  if (!all.isfinite().all().item<bool>() || !all.any().item<bool>()) {
    return 0.0F;
  }
  return static_cast<float>(1 + fingerprint({static_cast<const char*>(all.const_data_ptr()), all.nbytes()}) % kMost);
}

}  // namespace

StepCheck::StepCheck(const c10d::ProcessGroup& group, std::string what)
    : world_size_(group.getSize()), rank_(group.getRank()), what_(std::move(what)), is_off_(is_turned_off()) {}

void StepCheck::note_update() {
  const std::lock_guard<std::mutex> lock(mutex_);
  was_updated_ = true;
}

void StepCheck::say_nothing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  says_nothing_ = true;
}

void StepCheck::begin_step(int64_t step, bool has_gradients) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_first = std::exchange(step_, step) < 0;
  const bool had_gradients = std::exchange(had_gradients_, has_gradients);
  says_nothing_ |= !has_gradients || !had_gradients;
  has_stamped_ = false;
  num_updates_ += std::exchange(was_updated_, false) && !is_first ? 1 : 0;
}

std::optional<std::vector<float>> StepCheck::stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                                   WeightCheck* weights, bool in_rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(has_stamped_, true)) {
    newest_stamp_ = new_stamp(engine, device, gradients, weights, in_rows);
  }
  return newest_stamp_;
}

std::optional<std::vector<float>> StepCheck::new_stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                                       WeightCheck* weights, bool in_rows) {
  constexpr int64_t kOneOf = 16;
  const bool is_cheap = device.is_cpu() && in_rows;
  const int64_t num_before = is_cheap ? 0 : num_costly_++;
  // The second stamp has the weights after the first update. On a device the host would wait for the first one's sum.
  const int64_t num_first = device.is_cpu() ? 2 : 1;
  if ((num_before >= num_first && num_before % kOneOf != 0) || is_capturing(device)) {
    return std::nullopt;
  }
  if (world_size_ == 1) {
    return std::vector<float>();
  }
  const int64_t num_updates = std::exchange(num_updates_, 0);
  std::vector<float> stamp(static_cast<size_t>(kNumNumbers * world_size_), 0.0F);
  if (!std::exchange(says_nothing_, false) && !is_off_) {
    float* const own = &stamp[kNumNumbers * rank_];
    own[kEngine] = static_cast<float>(engine + 1);
    own[kUpdates] = static_cast<float>(num_updates);
    own[kGradients] = gradients.empty() ? 0.0F : fingerprint_of(gradients);
    const auto of_weights = weights == nullptr ? WeightCheck::Numbers() : weights->numbers(step_);
    own[kSample] = of_weights.sample;
    own[kWeights] = of_weights.weights;
    own[kMachine] = of_weights.machine;
  }
  return stamp;
}

void StepCheck::arrive(const at::Tensor& sum, WeightCheck* weights) {
  if (!sum.defined() || sum.numel() == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (sum.is_cpu()) {
    check(sum, weights);
    return;
  }
  std::optional<HostCopy> before = std::exchange(copy_, std::nullopt);
  copy_.emplace(sum);
  if (before) {
    check(before->wait(), weights);  // the step was many steps ago
  }
}

void StepCheck::check(const at::Tensor& sum, WeightCheck* weights) const {
  const at::Tensor numbers = sum.to(at::kFloat);
  const auto* theirs = numbers.const_data_ptr<float>();
  std::map<std::pair<int64_t, int64_t>, std::string> ranks_of;
  for (int64_t rank = 0; rank < world_size_; ++rank, theirs += kNumNumbers) {
    if (theirs[kEngine] > 0) {
      auto& ranks = ranks_of[{static_cast<int64_t>(theirs[kEngine]) - 1, static_cast<int64_t>(theirs[kUpdates])}];
      ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
    }
  }
  if (ranks_of.size() <= 1) {
    warn_of_same_data(numbers.const_data_ptr<float>());
    if (weights != nullptr && !ranks_of.empty()) {
      std::vector<WeightCheck::Numbers> of_weights;
      theirs = numbers.const_data_ptr<float>();
      for (int64_t rank = 0; rank < world_size_; ++rank, theirs += kNumNumbers) {
        of_weights.push_back({theirs[kSample], theirs[kWeights], theirs[kMachine]});
      }
      weights->arrive(of_weights, ranks_of.begin()->first.first, step_);
    }
    return;
  }
  std::ostringstream who;
  for (const auto& [stamp, ranks] : ranks_of) {
    const auto& [engine, num_updates] = stamp;
    who << (who.tellp() > 0 ? "; " : "") << ranks << ": engine " << engine << ", " << num_updates
        << (num_updates == 1 ? " update" : " updates");
  }
  throw RanksDifferError(c10::str(
      "fastsync: the ranks have averaged gradients that do not belong together, by step ", step_, " of ", what_,
      ". The engines that met, and how often each had seen its parameters updated since they met before: ", who.str(),
      ". Has a rank run a backward more than the others, left out an optimizer step, or run its ",
      "backwards, or attach(), in another order? These gradients are no mean: go on from a checkpoint. Where ",
      "ranks may differ so, FASTSYNC_STEP_CHECK=0 turns this check off"));
}

void StepCheck::warn_of_same_data(const float* numbers) const {
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    const float theirs = numbers[kNumNumbers * rank + kGradients];
    if (rank_ != 0 || theirs == 0.0F || theirs != numbers[kGradients]) {
      return;
    }
  }
  TORCH_WARN("fastsync: all ", world_size_,
             " ranks have the same gradients in their first step, so they seem to train ",
             "on the same data, and learn no more than one would: give each rank its own part, as ",
             "torch.utils.data.distributed.DistributedSampler does, or random numbers of its own");
}

}  // namespace fastsync
