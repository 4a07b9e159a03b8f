// A Parameter is a parameter of an engine. It keeps the state of the gradient from one step to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

#include "engine/saved_state.h"
#include "engine/snapshot.h"

namespace fastsync {

// These functions take a parameter's tensor.

// Its gradient, maybe undefined. Tensor::grad() also looks whether it has to warn, which takes ten times as long.
inline const at::Tensor& grad_of(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl()->grad(); }
// The dtype of its gradients: its own, except where torch was told another one (Tensor.grad_dtype).
at::ScalarType grad_dtype_of(const at::Tensor& parameter);
// The dtype and the number of the values that travel. A complex value travels as a pair of reals.
at::ScalarType real_dtype_of(const at::Tensor& parameter);
int64_t num_reals_of(const at::Tensor& parameter);
// Whether the parameter's gradient travels.
inline bool takes_part(const at::Tensor& parameter) { return parameter.requires_grad() && parameter.numel() > 0; }

// What gradients become: the mean over all ranks, the mean over the ranks that have used the parameter, or the sum.
enum class Op : int8_t { kMean, kMeanOfUsed, kSum };

struct Parameter {
  Parameter(const at::Tensor& tensor, std::string name, Op op, bool is_sparse)
      : id(tensor.getIntrusivePtr()), name(std::move(name)), op(op), is_sparse(is_sparse) {}

  // Returns the parameter's tensor. Throws c10::Error if it no longer exists.
  at::Tensor lock() const;
  // A line that the ranks have to agree on.
  std::string description(const at::Tensor& tensor) const;
  // Whether its gradient may hold something of this rank that no sync has averaged. If hooks mark new gradients, only
  // the mark has to be read.
  bool has_own_gradient(bool has_hook) const;
  // Notes that backward has reached the parameter, and the gradient that backward has accumulated, if any.
  void note_gradient(const at::Tensor& tensor);
  // Marks the gradient as new, if one has come. It takes part in the step under way, or is left over for the next one.
  void mark_new(bool left_over);
  // Whether a gradient is left over, and nothing has changed it since.
  bool has_left_over() const;
  // Takes over the state of the same parameter of another engine.
  void take_over(Parameter& other);

  // Note [Sums]
  // With op="sum" a gradient that was synchronised must not travel again, because each rank would count it once more.
  // So before backward accumulates into it, the sum is put aside. Until the next sync .grad holds only what has come
  // since, and then both are added. zero_grad() in between is meant for the sum, too.

  // Puts the sum aside, if .grad is one. Throws c10::Error if .grad and the sum cannot be told apart any more.
  void put_sum_aside();
  // Adds the sum that was put aside to .grad.
  void put_sum_back();
  // Forgets the sum if zero_grad() was meant for it. Throws c10::Error if another change may have been meant for it.
  void check_sum(const at::Tensor& gradient);
  // Whether the gradient is a sum over the ranks already.
  bool is_sum(const at::Tensor& gradient) const { return op == Op::kSum && averaged.is_of(gradient); }
  // Whether a gradient of an earlier sync travels again. In the mean over all ranks it counts for this rank.
  bool old_travels(const at::Tensor& gradient) const { return op != Op::kMeanOfUsed && !is_sum(gradient); }

  ParameterId id;
  std::string name;
  Op op;
  bool is_sparse;             // whether its gradients are sparse, see Note [Sparse gradients]
  bool is_new = false;        // whether it may have a gradient that no sync has averaged
  bool is_left_over = false;  // whether its gradient is of a backward inside no_sync()
  bool repeats = false;       // whether it gets several gradients in a backward, so that only the end makes them final
  Snapshot averaged;          // the gradient as the newest sync has left it
  Snapshot accumulated;       // the gradient as the newest backward has left it: for sums, and while it is left over
  at::Tensor sample;          // of the gradient as averaged, with shards alone, see Note [Sampled gradients]
  at::Tensor sum;             // the sum that was put aside, see Note [Sums]
};

}  // namespace fastsync
