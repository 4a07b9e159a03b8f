// A step of fastsync.Elastic, as far as each step needs it. What follows the loss of a rank is Python's.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/before_step.h"
#include "engine/synchronizer.h"

namespace fastsync {

// Python reads and sets its state between calls, in the thread that takes the steps.
struct ElasticStep {
  // Whether there is another step. If so, index tells its number.
  bool goes_on(int64_t num_steps);
  // Whether the newest step was entered, and the next one needs nothing before it.
  bool is_smooth() const { return was_entered && !must_agree; }

  // Begins a step: it sets this rank's signal, and keeps what the step changes beside parameters.
  void enter(std::vector<at::Tensor> buffers);
  // Ends a step that no error has left. Returns whether no rank has failed in it. If one has, nothing changes.
  bool finish();
  // Whether the optimizer may step now. Before and after the loop it may.
  bool may_step() const;
  // See Synchronizer::signals.
  std::optional<double> signals() const;

  std::shared_ptr<Synchronizer> engine;
  BeforeStep before;
  bool has_buffers = false;
  int64_t index = 0;
  int64_t engine_step = 0;  // the engine's number of this step
  bool is_in_loop = false;
  bool was_entered = false;
  bool has_stepped = false;  // whether the optimizer has
  bool has_idled = false;    // whether the newest step has ended without an error, and without the optimizer's step
  bool must_agree = false;   // whether the ranks agree on the members before the next step
  // The thread that watches other ranks reads or sets these, while C++ runs without the GIL.
  std::atomic<int64_t> num_finished = 0;
  std::atomic<bool> is_inside = false;
  std::atomic<bool> wants_change = false;  // whether a new rank waits; this rank's signal tells it to the others
};

}  // namespace fastsync
