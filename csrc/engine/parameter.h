// A parameter of an engine: what travels for its gradient, and what becomes of it when the average has come.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/saved_state.h"
#include "engine/snapshot.h"

namespace fastsync {

// What the parameter's gradients are of: its own dtype, but where torch was told another one (Tensor.grad_dtype).
at::ScalarType grad_dtype_of(const at::Tensor& parameter);

struct Parameter {
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  // sums: over the ranks, and does not average.
  Parameter(const at::Tensor& tensor, std::string name, bool sums)
      : id(tensor.getIntrusivePtr()), name(std::move(name)), sums(sums) {}

  // Throws c10::Error where it no longer exists.
  at::Tensor lock() const;
  // Whether its gradient is still what the newest sync left; false also where that cannot be proven.
  bool is_unchanged() const;
  // Whether it has a gradient, or a part of one, that no sync has averaged. Where hooks mark what is new, nothing but
  // the mark has to be read.
  bool has_own_gradient(bool has_hook) const;
  // A backward has been here, and may have accumulated a gradient.
  void note_gradient();
  // It may have a gradient that no sync has averaged, and takes part in the one under way, or is left for the next.
  void mark_new(bool is_left_over);
  // Whether such a one is left, and nothing has changed it since.
  bool has_left_over() const;
  // Goes on as another one, of another engine.
  void take_over(Parameter& other);

  // A sum over the ranks must not travel again, for each rank would count it once more. So before a gradient is
  // accumulated, the sum that an earlier sync has left is put aside. Until the next sync .grad has what has come since.
  // Throws c10::Error where the two cannot be told apart any more.
  void put_sum_aside();
  // .grad has both.
  void put_sum_back();

  // What follows is for while a sync is under way, and the tensor is here.

  bool takes_part() const { return tensor.requires_grad() && tensor.numel() > 0; }
  // Complex gradients travel as the pairs of reals that they are.
  at::ScalarType real_dtype() const { return c10::toRealValueType(grad_dtype_of(tensor)); }
  int64_t num_reals() const { return c10::isComplexType(grad_dtype_of(tensor)) ? 2 * tensor.numel() : tensor.numel(); }
  // As many values of that dtype, in almost no memory.
  at::Tensor outline() const;
  void lay_out(size_t in_bucket, size_t at_place);
  // Which parameter was frozen, unfrozen, moved, cast or put in another order since the layout was made; empty where
  // none of that was.
  std::string change() const;

  // Throws c10::ValueError where it has a gradient that cannot travel.
  void check_gradient() const;
  // One that no sync has averaged.
  bool has_new_gradient() const { return is_new && tensor.grad().defined(); }
  // What travels, dense and as reals. Without a new gradient it is what the gradient is, so that the mean is right
  // where another rank has a new one: zeros where there is none, or a sum.
  at::Tensor gradient_to_send();
  // The same for a backward that failed.
  at::Tensor poison() const;
  // Where the average has come to, as reals; undefined where there is no gradient.
  at::Tensor average() const;
  // What traveled holds the average. The gradient takes it where some rank has a new one. Returns whether it is no more
  // than that, as where a sum was there before.
  bool take_average(bool exists);
  // After that, where no rank has a new one: what is averaged is what was kept, or nothing.
  void keep(bool counts);

  ParameterId id;
  std::string name;
  bool sums;
  at::Tensor tensor;  // while a sync is under way
  size_t bucket = kNone;
  size_t place = 0;  // among all that are in buckets, in their order
  bool is_new = false;
  bool is_left_over = false;
  bool is_ready = false;
  std::optional<c10::Stream> stream;  // on which its gradient got ready
  bool repeats = false;               // gets more than one gradient in a backward: final only at its end
  at::Tensor stand_in;                // what travels where the gradient is missing or lies otherwise than the parameter
  std::vector<int64_t> sizes;         // this and the next three: what the layout was made for
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;  // of gradients
  c10::Device device = c10::kCPU;
  Snapshot averaged;     // by the newest sync
  Snapshot accumulated;  // by the newest backward
  at::Tensor sum;        // that was put aside

 private:
  bool is_sum(const at::Tensor& gradient) const { return sums && averaged.is_of(gradient); }
  void check_sum(const at::Tensor& gradient);
};

}  // namespace fastsync
