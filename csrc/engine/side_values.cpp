#include "engine/side_values.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "passes/backend.h"
#include "passes/graph_memory.h"

namespace fastsync {

SideValues::SideValues(const std::vector<Passenger*>& passengers) {
  for (Passenger* const passenger : passengers) {
    seats_.push_back({passenger});
  }
}

std::string SideValues::description() const {
  std::string lines;
  for (const Seat& seat : seats_) {
    lines += seat.passenger->description();
  }
  return lines;
}

bool SideValues::wait_for_end() const {
  return std::ranges::any_of(seats_, [](const Seat& seat) { return seat.passenger->waits_for_end(); });
}

void SideValues::begin(const Journey& journey) {
  for (const Seat& seat : seats_) {
    seat.passenger->begin(journey);
  }
}

at::Tensor SideValues::to_send(Journey& journey) {
  std::vector<float> numbers;
  for (Seat& seat : seats_) {
    const auto begin = static_cast<int64_t>(numbers.size());
    seat.passenger->add_numbers(numbers, journey);
    seat.sums = {{}, begin, std::ssize(numbers) - begin};
  }
  int64_t end = std::ssize(numbers);
  journey.numbers = on_device(std::move(numbers), journey.device);
  std::vector<at::Tensor> all{journey.numbers};
  for (Seat& seat : seats_) {
    const size_t first = all.size();
    seat.passenger->add_tensors(all, journey);
    if (all.size() > first) {
      seat.sums.begin = end;
      std::for_each(all.begin() + static_cast<std::ptrdiff_t>(first), all.end(),
                    [&](const at::Tensor& each) { end += each.numel(); });
      seat.sums.numel = end - seat.sums.begin;
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

void SideValues::fail() {
  for (const Seat& seat : seats_) {
    seat.passenger->fail();
  }
}

void SideValues::leave_behind() {
  for (const Seat& seat : seats_) {
    seat.passenger->leave_behind();
  }
}

void SideValues::check(const at::Tensor& sums, const Journey& journey) {
  for (Seat& seat : seats_) {
    seat.sums.row = sums;
    seat.passenger->check(seat.sums, journey);
  }
}

void SideValues::take(const Journey& journey) {
  for (const Seat& seat : seats_) {
    seat.passenger->take(seat.sums, journey);
  }
}

}  // namespace fastsync
