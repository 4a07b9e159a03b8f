// The gradient of a parameter in the step under way: what travels for it, and what becomes of it when the average has
// come.
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

  // It is final, unless it gets ready again. Returns whether it has been ready before. Throws c10::ValueError if it
  // cannot travel.
  bool mark_ready();
  bool is_ready() const { return is_ready_; }
  // The stream on which it got ready.
  const std::optional<c10::Stream>& stream() const { return stream_; }

  bool is_here() const { return tensor_.grad().defined(); }
  // Whether there is one that no sync has averaged.
  bool is_new() const { return parameter_->is_new && is_here(); }

  // What travels, dense and as reals. Without a new gradient it is what keeps the mean right where another rank has a
  // new one: the old gradient; or zeros, if there is none or it is a sum.
  at::Tensor to_send();
  // What travels in its place after a failure: nan.
  at::Tensor poison() const;

  // Whether what travels is a copy, because the gradient is missing or lies otherwise than the parameter.
  bool has_stand_in() const { return stand_in_.defined(); }
  // What has traveled holds the average now. The gradient takes it over if it exists on some rank. Returns whether it
  // is no more than that; else it was added to a sum.
  bool take_average(bool exists);
  // No rank has a new gradient, and the average of what traveled is not what statistics are of: they are of the kept
  // gradient, or of nothing.
  void count_kept(bool is_kept);
  // What statistics are of, as reals. Undefined if there is no gradient.
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
