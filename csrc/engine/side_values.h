// Side values are what the passengers add to a step's last bucket: a row of float32 values, which is summed over the
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/passenger.h"

namespace fastsync {

class SideValues {
 public:
  // The passengers must outlive this object.
  explicit SideValues(const std::vector<Passenger*>& passengers);

  std::string description() const { return lines(&Passenger::description); }
  std::string news() const { return lines(&Passenger::news); }
  void note_agreed() const { call(&Passenger::note_agreed); }
  bool wait_for_end() const;
  void begin(const StepInfo& step);
  // Returns the row. First come the numbers of all passengers.
  at::Tensor to_send(StepInfo& step);
  void fail() const { call(&Passenger::fail); }
  void leave_behind() const { call(&Passenger::leave_behind); }
  // Takes the row of sums. Throws what a passenger throws.
  void check(const at::Tensor& sums, const StepInfo& step);
  void take(const StepInfo& step);

 private:
  struct Entry {
    Passenger* passenger;
    Sums sums = {};  // of the newest step
  };

  std::string lines(std::string (Passenger::*of)() const) const;
  void call(void (Passenger::*method)()) const;
  at::Tensor on_device(std::vector<float> numbers, c10::Device device);

  std::vector<Entry> entries_;
  std::vector<float> numbers_;  // what numbers_on_device_ holds
  at::Tensor numbers_on_device_;
};

}  // namespace fastsync
