#include "engine/side_values.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "passes/backend.h"
#include "passes/cuda_graphs.h"

namespace fastsync {

SideValues::SideValues(const std::vector<Passenger*>& passengers) {
  for (Passenger* const passenger : passengers) {
    entries_.push_back({passenger});
  }
}

std::string SideValues::lines(std::string (Passenger::*of)() const) const {
  std::string lines;
  for (const Entry& entry : entries_) {
    lines += (entry.passenger->*of)();
  }
  return lines;
}

void SideValues::call(void (Passenger::*method)()) const {
  for (const Entry& entry : entries_) {
    (entry.passenger->*method)();
  }
}

bool SideValues::wait_for_end() const {
  return std::ranges::any_of(entries_, [](const Entry& entry) { return entry.passenger->waits_for_end(); });
}

void SideValues::begin(const StepInfo& step) {
  for (const Entry& entry : entries_) {
    entry.passenger->begin(step);
  }
}

at::Tensor SideValues::to_send(StepInfo& step) {
  std::vector<float> numbers;
  for (Entry& entry : entries_) {
    const auto begin = static_cast<int64_t>(numbers.size());
    entry.passenger->add_numbers(numbers, step);
    entry.sums = {{}, begin, std::ssize(numbers) - begin};
  }
  int64_t end = std::ssize(numbers);
  step.numbers = on_device(std::move(numbers), step.device);
  std::vector<at::Tensor> all{step.numbers};
  for (Entry& entry : entries_) {
    const size_t first = all.size();
    entry.passenger->add_tensors(all, step);
    if (all.size() > first) {
      entry.sums.begin = end;
      std::for_each(all.begin() + static_cast<std::ptrdiff_t>(first), all.end(),
                    [&](const at::Tensor& each) { end += each.numel(); });
      entry.sums.numel = end - entry.sums.begin;
    }
  }
  return all.size() == 1 ? all.front() : at::cat(all);
}

// A CUDA graph cannot copy them.
at::Tensor SideValues::on_device(std::vector<float> numbers, c10::Device device) {
  if (!numbers_on_device_.defined() || numbers_on_device_.device() != device || numbers != numbers_) {
    TORCH_CHECK(!is_capturing(device), "fastsync: other parameters have a gradient in the step that a CUDA graph ",
                "captures than in the one before it: take a step like this one before");
    numbers_on_device_ = to_device(numbers, device);
    numbers_ = std::move(numbers);
  }
  if (is_capturing(device)) {  // asked first, because the list costs more
    hold_for_graph(device, {numbers_on_device_});
  }
  return numbers_on_device_;
}

void SideValues::check(const at::Tensor& sums, const StepInfo& step) {
  for (Entry& entry : entries_) {
    entry.sums.row = sums;
    entry.passenger->check(entry.sums, step);
  }
}

void SideValues::take(const StepInfo& step) {
  for (const Entry& entry : entries_) {
    entry.passenger->take(entry.sums, step);
  }
}

}  // namespace fastsync
