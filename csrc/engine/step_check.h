// The step check finds out whether the gradients that meet in a sync belong together, because gradients of different
// parameters have no mean. Each rank sends a stamp beside its gradients. It tells the engine, and how many updates of
// the parameters the rank has seen. In the first step it also has a fingerprint of the gradients: if that is the same
// on all ranks, so is their data. Now and then it has a number made of a sample of the weights, see WeightCheck.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/weight_check.h"
#include "transport/host_copy.h"

namespace fastsync {

// Thread-safe, because stamps may arrive on a thread of the process group.
class StepCheck {
 public:
  // `what` is the name of the engine or the bucket in errors.
  StepCheck(const c10d::ProcessGroup& group, std::string what);

  // Notes that a step begins. If a rank has no gradients of its own, as in DDP's join, its stamp says nothing. In the
  // step after that it says nothing either, because the rank has meanwhile got parameters that others have updated.
  void begin_step(int64_t step, bool has_gradients);
  // Notes that an optimizer has updated the parameters.
  void note_update();
  // Makes the next stamp say nothing, because this rank has got another rank's parameters.
  void say_nothing();

  // Returns the stamp that this rank sends. All ranks send stamps in the same steps. Stamps are added up over the
  // ranks: each rank has numbers of its own in it, and zeros in place of the other ranks' numbers. The numbers are
  // whole, and float32 holds them. A stamp is empty if there is one rank. The engine is a number that the ranks have
  // agreed on. The gradients are those of the first step, or none. There is no stamp while a CUDA graph is captured.
  // In a step a bucket has one stamp, however often it is sent. After the first steps most have none if it would cost
  // something: a copy from the host or, unless it travels in rows, a collective of its own. `weights` is null where
  // nobody compares the weights.
  std::optional<std::vector<float>> stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                          WeightCheck* weights, bool in_rows = true);

  // Takes the sum of the ranks' stamps. If they differ, it throws RanksDifferError on every rank. On a CPU it throws at
  // once. On another device it throws when the next sum arrives, because the host does not wait.
  void arrive(const at::Tensor& sum, WeightCheck* weights);

 private:
  // A stamp has these numbers for each rank. kEngine is the engine's number plus 1, or 0 if the stamp says nothing.
  enum Number { kEngine, kUpdates, kGradients, kSample, kWeights, kMachine, kNumNumbers };
  std::optional<std::vector<float>> new_stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                              WeightCheck* weights, bool in_rows);
  void check(const at::Tensor& sum, WeightCheck* weights) const;
  void warn_of_same_data(const float* numbers) const;

  const int64_t world_size_;
  const int64_t rank_;
  const std::string what_;
  const bool is_off_;

  std::mutex mutex_;           // guards the next members
  int64_t step_ = -1;          // the newest step; below 0 before the first
  int64_t num_updates_ = 0;    // updates since the newest stamp; several between two steps count as one
  int64_t num_costly_ = 0;     // in how many steps a stamp would have cost a copy or a collective
  bool says_nothing_ = false;  // whether the next stamp says nothing
  bool had_gradients_ = true;  // whether the newest step has gradients of this rank's own
  bool has_stamped_ = false;   // whether the newest step has its stamp
  std::optional<std::vector<float>> newest_stamp_;
  bool was_updated_ = false;      // whether the parameters were updated since the newest step began
  std::optional<HostCopy> copy_;  // of the newest sum, from a device
};

}  // namespace fastsync
