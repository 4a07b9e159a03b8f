// The gradient of a parameter in the step under way: what is sent for it, and where its average goes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

#include "engine/parameter.h"

namespace fastsync {

class Gradient {
 public:
  // Holds the parameter's tensor. Throws c10::Error if that no longer exists.
  explicit Gradient(Parameter& parameter);

  Parameter& parameter() const { return *parameter_; }
  const at::Tensor& tensor() const { return tensor_; }  // the parameter's

  // The gradient is final, unless it gets ready again. Returns whether it was ready before. Throws c10::ValueError if
  // it cannot be sent.
  bool mark_ready();
  bool is_ready() const { return is_ready_; }
  // The stream on which it got ready.
  const std::optional<c10::Stream>& stream() const { return stream_; }

  bool is_here() const { return tensor_.grad().defined(); }
  // Whether there is one that no sync has averaged.
  bool is_new() const { return parameter_->is_new && is_here(); }

  // Returns what is sent, dense and as reals. Without a new gradient that is the old one, so that the mean is right if
  // another rank has a new one. It is zeros if there is no gradient, or a sum.
  at::Tensor to_send();
  // Returns what is sent after a failure: nan.
  at::Tensor poison() const;

  // Whether a copy was sent, because the gradient is missing or lies in memory otherwise than the parameter.
  bool has_stand_in() const { return stand_in_.defined(); }
  // What was sent holds the average now. The gradient takes it over if some rank has a new gradient: then it exists.
  // Returns whether the gradient is no more than the average. Otherwise that was added to a sum.
  bool take_average(bool exists);
  // For a gradient that is new on no rank: statistics count what is kept of an earlier sync, or zeros, in place of the
  // average of what was sent.
  void count_kept(bool is_kept);
  // The values that statistics count, as reals. Undefined if there is no gradient.
  at::Tensor average() const;

 private:
  void check() const;

  Parameter* parameter_;
  at::Tensor tensor_;
  at::Tensor stand_in_;
  std::optional<c10::Stream> stream_;
  bool is_ready_ = false;
};

}  // namespace fastsync
