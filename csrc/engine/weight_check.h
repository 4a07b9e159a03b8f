// The weight check notices ranks that hold different parameters. Most faults of a data-parallel training end so, and
// nothing else would tell. Each rank now and then takes some values of each parameter, and puts one number made of them
// into its stamp, see StepCheck.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/saved_state.h"

namespace fastsync {

// Note [When weights are compared]
//   Ranks compare them in the step after the first update, and from then on once in every kEvery steps. Each time they
//   take other values. Equal weights have equal bits, so nothing is lost by rounding. On a device the host does not
//   wait for the values: the number travels with the next stamp. If numbers differ, every rank sees it in the same
//   step. Then ranks tell each other through the store what they have of each parameter.
//
// Thread-safe.
class WeightCheck {
 public:
  WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
              std::vector<std::string> names);

  // Notes that an optimizer has updated the parameters.
  void note_update();
  // Returns the number that this rank sends in the step. It is whole, and float32 holds it. It is 0, which is compared
  // with nothing, if none is due.
  float number(int64_t step);
  // Takes the numbers of all ranks. Throws c10::Error if they differ. It names the first parameter that does, and the
  // ranks. `engine` and `step` are the same on all ranks.
  void arrive(const std::vector<float>& numbers, int64_t engine, int64_t step);

 private:
  static constexpr int64_t kEvery = 50;

  // Values of each parameter, in the bytes that they have.
  struct Sample {
    std::vector<std::string> values;                          // by parameter
    std::vector<std::pair<size_t, at::Tensor>> on_their_way;  // parameters, and what has come of them from a device
    std::vector<c10::Event> have_come;
  };

  Sample take(int64_t step) const;
  static std::vector<uint64_t> digests_of(Sample sample);
  std::string difference(int64_t engine, int64_t step) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<std::string> names_;
  std::vector<ParameterId> ids_;

  std::mutex mutex_;               // guards the next members
  bool was_updated_ = false;       // whether there was an update
  bool follows_update_ = false;    // whether a sample was taken since the first
  int64_t newest_ = 0;             // the step of the newest sample
  std::optional<Sample> pending_;  // a sample that comes from a device
  std::vector<uint64_t> digests_;  // of the newest number's sample, by parameter
};

}  // namespace fastsync
