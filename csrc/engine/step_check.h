// Do the gradients that meet in a sync belong together? Gradients of different parameters have no mean. So each rank
// sends a stamp beside its gradients, which tells the engine and how many updates of the parameters the rank has seen.
// In the first step it also holds a fingerprint of the gradients: if it is the same on all ranks, so is their data.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fastsync {

// Thread-safe, because stamps may arrive on a thread of the process group.
class StepCheck {
 public:
  // Errors name the engine or the bucket so.
  StepCheck(const c10d::ProcessGroup& group, std::string what);

  // A step begins. A rank without gradients of its own, such as one in DDP's join, says nothing. It says nothing in the
  // step after that either, because it has meanwhile got parameters that others have updated.
  void begin_step(int64_t step, bool has_gradients);
  // An optimizer has updated the parameters.
  void note_update();
  // The next stamp says nothing, because this rank has got another rank's parameters.
  void say_nothing();

  // The stamp that this rank sends, in the same steps as the others. It is to be added up over the ranks: each has
  // numbers of its own in it, which are whole and which float32 holds, and zeros for the others'. Empty for one rank.
  // The engine is a number that the ranks have agreed on. The gradients are those of the first step, or none.
  // There is no stamp while a CUDA graph is captured. If a stamp costs a copy from the host or, for lack of room, a
  // collective of its own, there is none in most steps.
  std::optional<std::vector<float>> stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                          bool has_room = true);

  // Takes the sum of the ranks' stamps. If they differ, it throws c10::Error on every rank: on a CPU at once, and on
  // another device when the next sum arrives, because the host does not wait.
  void arrive(const at::Tensor& sum);

 private:
  // What a stamp holds for each rank.
  enum Number { kEngine, kUpdates, kGradients, kNumNumbers };  // the engine's number plus 1, or 0 to say nothing
  // A sum on its way from the device.
  struct Copy {
    at::Tensor sum;  // in pinned memory
    c10::Event has_come;
  };

  void check(const at::Tensor& sum) const;
  void warn_of_same_data(const float* numbers) const;

  const int64_t world_size_;
  const int64_t rank_;
  const std::string what_;
  const bool is_off_;

  std::mutex mutex_;           // guards what follows
  int64_t step_ = -1;          // below 0 before the first
  int64_t num_updates_ = 0;    // since the newest stamp: of an optimizer's steps between two of ours, one counts
  int64_t num_costly_ = 0;     // steps in which a stamp costs
  bool says_nothing_ = false;  // in the next stamp
  bool had_gradients_ = true;  // in the newest step
  bool was_updated_ = false;   // since the newest step began
  std::optional<Copy> copy_;
};

}  // namespace fastsync
