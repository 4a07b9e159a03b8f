#include "engine/step_check.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "passes/backend.h"
#include "transport/agreement.h"

namespace fastsync {

namespace {

bool is_turned_off() {
  const char* const setting = std::getenv("FASTSYNC_STEP_CHECK");
  return setting != nullptr && std::string(setting) == "0";
}

// One number of a gradient's first values, in which each counts by its place.
at::Tensor number_of(const at::Tensor& gradient) {
  constexpr int64_t kMost = 1 << 16;
  const at::Tensor first = gradient.reshape({-1}).narrow(0, 0, std::min(gradient.numel(), kMost)).cpu().to(at::kDouble);
  return first.dot(at::arange(1, first.numel() + 1, first.options()));
}

// A whole number that float32 holds; 0 where there is nothing to compare: gradients of zeros, or that are not finite.
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
  step_ = step;
  const bool had_gradients = std::exchange(had_gradients_, has_gradients);
  says_nothing_ |= !has_gradients || !had_gradients;
  const bool is_first = std::exchange(is_first_, false);
  num_updates_ += std::exchange(was_updated_, false) && !is_first ? 1 : 0;
}

std::optional<std::vector<float>> StepCheck::stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                                   bool has_room) {
  constexpr int64_t kOneOf = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_cheap = device.is_cpu() && has_room;
  if ((!is_cheap && num_costly_++ % kOneOf != 0) || is_capturing(device)) {
    return std::nullopt;
  }
  if (world_size_ == 1) {
    return std::vector<float>();
  }
  const int64_t num_updates = std::exchange(num_updates_, 0);
  std::vector<float> stamp(static_cast<size_t>(kNumbers * world_size_), 0.0F);
  if (!std::exchange(says_nothing_, false) && !is_off_) {
    stamp[kNumbers * rank_] = static_cast<float>(engine + 1);
    stamp[kNumbers * rank_ + 1] = static_cast<float>(num_updates);
    stamp[kNumbers * rank_ + 2] = gradients.empty() ? 0.0F : fingerprint_of(gradients);
  }
  return stamp;
}

void StepCheck::arrive(const at::Tensor& sum) {
  if (!sum.defined() || sum.numel() == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (sum.is_cpu()) {
    check(sum);
    return;
  }
  const at::Tensor before = has_come_ ? on_its_way_ : at::Tensor();
  if (before.defined()) {
    has_come_->synchronize();  // of many steps ago
  }
  const auto device = sum.device();
  on_its_way_ = at::empty(sum.sizes(), sum.options().device(at::kCPU).pinned_memory(true));
  on_its_way_.copy_(sum, /*non_blocking=*/true);
  has_come_.emplace(device.type());
  has_come_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  if (before.defined()) {
    check(before);
  }
}

void StepCheck::check(const at::Tensor& sum) const {
  const at::Tensor numbers = sum.to(at::kFloat);
  const auto* of_rank = numbers.const_data_ptr<float>();
  std::map<std::pair<int64_t, int64_t>, std::string> ranks_of;
  for (int64_t rank = 0; rank < world_size_; ++rank, of_rank += kNumbers) {
    if (of_rank[0] > 0) {
      auto& ranks = ranks_of[{static_cast<int64_t>(of_rank[0]) - 1, static_cast<int64_t>(of_rank[1])}];
      ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
    }
  }
  if (ranks_of.size() <= 1) {
    warn_of_same_data(numbers.const_data_ptr<float>());
    return;
  }
  std::ostringstream who;
  for (const auto& [number, ranks] : ranks_of) {
    who << (who.tellp() > 0 ? "; " : "") << ranks << ": engine " << number.first << ", " << number.second
        << (number.second == 1 ? " update" : " updates");
  }
  TORCH_CHECK(false, "fastsync: the ranks have averaged gradients that do not belong together, by step ", step_, " of ",
              what_, ". The engines that met, and how often each had seen its parameters updated since they met ",
              "before: ", who.str(), ". Has a rank run a backward more than the others, left out an optimizer step, ",
              "or run its backwards, or attach(), in another order? These gradients are no ",
              "mean: go on from a checkpoint. Where ranks may differ so, FASTSYNC_STEP_CHECK=0 turns this check off");
}

void StepCheck::warn_of_same_data(const float* numbers) const {
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    if (rank_ != 0 || numbers[2] == 0.0F || numbers[kNumbers * rank + 2] != numbers[2]) {
      return;
    }
  }
  TORCH_WARN("fastsync: all ", world_size_,
             " ranks have the same gradients in their first step, so they seem to train ",
             "on the same data, and learn no more than one would: give each rank its own part, as ",
             "torch.utils.data.distributed.DistributedSampler does, or random numbers of its own");
}

}  // namespace fastsync
