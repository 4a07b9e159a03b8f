// The weight check notices ranks that hold different parameters. Most faults of a data-parallel training end so, and
// nothing else would tell. Each rank now and then takes some values of each parameter, and puts a number made of them
// into its stamp, see StepCheck.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/saved_state.h"
#include "engine/tensor_sample.h"

namespace fastsync {

// Note [When weights are compared]
//   Weights have to be equal when an optimizer has just stepped with gradients that were averaged. At other times they
//   may differ for good reasons: a method may change them between two backwards, and a rank may free their memory. So a
//   sample is taken right after the step, and its number travels with a stamp of a later step. A sample is due after
//   the first update, and from then on after one update of each kEvery steps. Each time it has other values. If several
//   optimizers step after the same averaging, the newest sample counts.
//
//   Ranks that have run out of batches take no samples, and some may have frozen parameters for a while. So a second
//   number tells what the sample is of: the update, and which parameters. Only the numbers of like samples are
//   compared. Equal weights have equal bits, so nothing is lost by rounding. If numbers differ, every rank sees it in
//   the same step. Then ranks tell each other through the store what they have of each parameter.
//
// Thread-safe.
class WeightCheck {
 public:
  // Numbers that a rank sends. They are whole, and float32 holds them. Both are 0, which is compared with nothing, if
  // it sends no sample.
  struct Numbers {
    float sample = 0.0F;   // what the sample is of
    float weights = 0.0F;  // what it is
  };

  WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
              std::vector<std::string> names);

  // Notes that an optimizer has updated the parameters with the averages of a step. Returns whether it took a sample.
  // That is the same on all ranks that make the same steps.
  bool note_update(int64_t step);
  // Returns what this rank sends in the step.
  Numbers numbers(int64_t step);
  // Takes the numbers of all ranks. Throws c10::Error if weights differ. It names the first parameter that does, and
  // the ranks. `engine` and `step` are the same on all ranks.
  void arrive(const std::vector<Numbers>& numbers, int64_t engine, int64_t step);

 private:
  static constexpr int64_t kEvery = 50;
  static constexpr int64_t kStepsOnTheWay = 8;  // for a sample on a device, so that the host does not wait for it

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::vector<std::string> names_;
  std::vector<ParameterId> ids_;

  std::mutex mutex_;                                         // guards the next members
  int64_t newest_ = -1;                                      // the step of the newest sample; below 0 before the first
  std::optional<TensorSample> pending_;                      // that sample, until its number is sent
  std::deque<std::pair<float, std::vector<uint64_t>>> sent_;  // what samples were of, and digests by parameter
};

}  // namespace fastsync
