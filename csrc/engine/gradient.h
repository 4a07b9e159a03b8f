// A Gradient is the gradient of a parameter in the step under way. It tells what is sent, and takes the mean.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>
#include <optional>

#include "engine/parameter.h"

namespace fastsync {

// Whether it holds some rows of the parameter, whole. Only such sparse gradients travel.
inline bool is_sparse_by_rows(const at::Tensor& gradient) { return gradient.is_sparse() && gradient.sparse_dim() == 1; }

// Note [Gradients in one memory]
//   Where a step of autograd hands one gradient to two parameters, as `a.view(2, 2) + b.view(2, 2)` does, both may lie
//   in one memory. A mean can be written to it for one of them alone. On another rank they lie in two, or are missing.
//   So only the first gradient that a step sends keeps the memory. Each other one has a stand-in, and becomes that.
//   Views of one memory that do not overlap stay what they are.

// The memory of the gradients that a step has sent, as far as others may share it: where each piece begins and ends.
using ClaimedMemory = std::map<const std::byte*, const std::byte*>;

class Gradient {
 public:
  // Holds the parameter's tensor. Throws c10::Error if the tensor no longer exists.
  explicit Gradient(Parameter& parameter);

  Parameter& parameter() const { return *parameter_; }
  const at::Tensor& tensor() const { return tensor_; }  // the parameter's tensor

  // Notes that the gradient is final, unless it gets ready again. Returns whether it was ready before. Throws
  // c10::ValueError if it cannot be sent.
  bool mark_ready();
  bool is_ready() const { return is_ready_; }
  // The stream on which the gradient got ready.
  const std::optional<c10::Stream>& stream() const { return stream_; }

  bool is_here() const { return grad_of(tensor_).defined(); }
  // Whether there is a gradient that no sync has averaged.
  bool is_new() const { return parameter_->is_new && is_here(); }

  // Returns what is sent, as reals. It is sparse if the parameter's gradients are, and else dense. Without a new
  // gradient that is the old gradient, so that the mean is right if another rank has a new one. It is zeros, or no
  // rows, if there is no gradient, or if the old one must not travel, see Parameter::old_travels.
  // So it is where the gradient lies in memory that is claimed. Claims its memory.
  at::Tensor to_send(ClaimedMemory& claimed);
  // Returns what is sent after a failure: nan. It is no rows if gradients are sparse, whose sum is told of the failure.
  at::Tensor poison() const;

  // Whether to_send has returned a stand-in: memory other than the gradient's. The gradient is old or missing then, or
  // lies in memory in another order than the parameter, or in that of another gradient.
  bool has_stand_in() const { return stand_in_.defined(); }
  // Takes the mean over the ranks, which lies in the memory that was sent. `exists` tells whether some rank has a new
  // gradient. If so, the gradient becomes the mean, or the mean is added to the parameter's sum. Returns false if it
  // was added.
  bool take_mean(bool exists);
  // Leaves the gradient what it is. From now on it counts as averaged.
  void keep();
  // Makes the gradient nan, if it has values. Returns whether it has.
  bool spoil() const;
  // The same where a number on the gradient's device says so. One value is made nan, because more would take a pass in
  // each step. Version counters do not count it.
  bool spoil_where(const at::Tensor& is_bad) const;
  // Makes a gradient of nan.
  void make_spoiled() const { tensor_.mutable_grad() = new_poison(); }
  // Has statistics count the gradient of an earlier sync if it is kept, else zeros. Call it only for a gradient that is
  // new on no rank, see Note [Statistics of a step].
  void count_kept_or_zeros(bool is_kept);
  // Returns the values that statistics count, as reals. Undefined if there is no gradient.
  at::Tensor counted() const;

 private:
  void check() const;
  bool claim_memory(ClaimedMemory& claimed) const;
  at::Tensor new_poison() const;

  Parameter* parameter_;
  at::Tensor tensor_;
  at::Tensor stand_in_;
  std::optional<c10::Stream> stream_;
  bool is_ready_ = false;
  bool lies_in_claimed_ = false;  // see Note [Gradients in one memory]
};

}  // namespace fastsync
