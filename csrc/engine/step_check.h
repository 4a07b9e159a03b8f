// Do the gradients that meet in a sync belong together? Every rank sends along which of its engines this is and how
// many updates of the parameters it has seen: gradients of different parameters have no mean. In the first step it also
// sends a fingerprint of its gradients, for they are the same on all ranks where all have the same data.
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

// Thread-safe, for what arrives may do so on a thread of the process group.
class StepCheck {
 public:
  // What it is of is named in errors.
  StepCheck(const c10d::ProcessGroup& group, std::string what);

  // Before a step. A rank without gradients of its own, as one that joins others (DDP's join), says nothing. Nor does
  // it in the step after that: the others have updated their parameters meanwhile, and it has got these.
  void begin_step(int64_t step, bool has_gradients);
  // An optimizer has updated the parameters.
  void note_update();
  // In the next stamp, for this rank's parameters have become what another's are.
  void say_nothing();

  // What every rank sends beside its gradients, in the same steps: its engine and the updates since the stamp before,
  // as whole numbers that float32 holds, in places where the other ranks send zeros. Empty where there are no other
  // ranks. The engine's number is one that the ranks have agreed on. The gradients are those of the first step, if they
  // are to be compared. Nothing while a CUDA graph is captured nor, where a stamp costs a copy from the host or, for
  // lack of room, a collective of its own, in most steps.
  std::optional<std::vector<float>> stamp(int64_t engine, c10::Device device, at::TensorList gradients,
                                          bool has_room = true);

  // Takes a sum over the ranks of stamps. On a CPU it throws c10::Error, on every rank, where they differ. On another
  // device the next one that arrives does, for the host does not wait.
  void arrive(const at::Tensor& sum);

 private:
  // Of a rank: its engine, or 0 from one that says nothing; its updates; and of gradients to compare a fingerprint.
  static constexpr int64_t kNumbers = 3;

  void check(const at::Tensor& sum) const;
  void warn_of_same_data(const float* numbers) const;

  const int64_t world_size_;
  const int64_t rank_;
  const std::string what_;
  const bool is_off_;

  std::mutex mutex_;  // guards what follows
  int64_t step_ = 0;
  int64_t num_updates_ = 0;    // since the stamp before
  int64_t num_costly_ = 0;     // steps in which one would cost
  bool says_nothing_ = false;  // until the next one
  bool is_first_ = true;
  bool had_gradients_ = true;  // in the step before
  bool was_updated_ = false;
  at::Tensor on_its_way_;  // a copy of a sum, in pinned memory
  std::optional<c10::Event> has_come_;
};

}  // namespace fastsync
