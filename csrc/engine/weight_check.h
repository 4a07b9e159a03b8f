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
//   compared. If they differ, every rank sees it in the same step. Then ranks tell each other through the store what
//   they have of each parameter.
//
//   The same program gives equal weights equal bits only on like machines: a CPU with other instructions, another GPU
//   or another number of threads may round otherwise. So only ranks on like machines are compared, and if there are
//   unlike ones, one rank warns, once. There nobody knows how far roundings let weights part. On like machines a method
//   may round otherwise on each rank, as by adding something of its own and taking it away again. So if the numbers
//   differ, ranks compare values, and if these are as close as roundings leave them, one rank warns, once.
//
// Thread-safe.
class WeightCheck {
 public:
  // Numbers that a rank sends. They are whole, and float32 holds them. The first two are 0, which is compared with
  // nothing, if it sends no sample.
  struct Numbers {
    float sample = 0.0F;   // what the sample is of
    float weights = 0.0F;  // what it is
    float machine = 0.0F;  // what computes it; never 0
  };

  // The names are for errors. The machine is a text that tells what rounds the weights here, see
  // Note [When weights are compared].
  WeightCheck(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& parameters,
              std::vector<std::string> names, std::string machine);

  // Whether note_update of this step will take a sample, if it can.
  bool is_due(int64_t step);
  // Notes that an optimizer has updated the parameters with the averages of a step. Returns whether it took a sample.
  // That is the same on all ranks that make the same steps.
  bool note_update(int64_t step);
  // Returns what this rank sends in the step.
  Numbers numbers(int64_t step);
  // Takes the numbers of all ranks. Throws RanksDifferError if weights differ. It names the first parameter that does,
  // and the ranks. `engine` and `step` are the same on all ranks.
  void arrive(const std::vector<Numbers>& numbers, int64_t engine, int64_t step);

 private:
  static constexpr int64_t kEvery = 50;
  static constexpr int64_t kStepsOnTheWay = 8;  // for a sample on a device, so that the host does not wait for it

  bool is_due_now(int64_t step) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  void warn_of_machines(const std::vector<Numbers>& numbers, const std::string& key);

  const std::vector<std::string> names_;
  const std::string machine_;
  const float machine_number_;
  std::vector<ParameterId> ids_;

  std::string key_;  // of the newest comparison in the store
  bool has_warned_of_machines_ = false;
  bool has_warned_of_rounding_ = false;
  std::mutex mutex_;                                // guards the next members
  int64_t newest_ = -1;                             // the step of the newest sample; below 0 before the first
  std::optional<TensorSample> pending_;             // that sample, until its number is sent
  std::deque<std::pair<float, std::string>> sent_;  // what samples were of, and their texts
};

}  // namespace fastsync
