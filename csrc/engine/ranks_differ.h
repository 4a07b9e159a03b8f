// The error of ranks that have parted: they hold different weights, or have averaged gradients that do not belong
// together. Every rank throws it in the same step, and none is lost. In Python it is fastsync.errors.RanksDifferError,
// also where torch's backward() hands it on.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <string>
#include <utility>

namespace fastsync {

class RanksDifferError : public torch::PyTorchError {
 public:
  explicit RanksDifferError(std::string message) : torch::PyTorchError(std::move(message)) {}
  // Called with the GIL.
  PyObject* python_type() override { return type; }

  // Set once, when Python loads the extension.
  static inline PyObject* type = nullptr;
};

}  // namespace fastsync
