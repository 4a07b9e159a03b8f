#include "sums/error_feedback.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

namespace fastsync {

namespace {

std::vector<at::Tensor> flat_clones(std::vector<at::Tensor> tensors) {
  std::transform(tensors.begin(), tensors.end(), tensors.begin(), [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.clone(at::MemoryFormat::Contiguous).view({-1}) : tensor;
  });
  return tensors;
}

}  // namespace

void ErrorFeedback::apply_to(FlatGradients& gradients, const std::vector<bool>& stand_in, Keep keep) {
  before_.clear();
  if (!newest_.memory.defined() || newest_.memory.numel() != gradients.num_values ||
      alignment_ != gradients.alignment) {
    const Residuals found = std::exchange(newest_, new_residuals(gradients));
    for (size_t i = 0; i < found.of_gradients.size(); ++i) {
      if (found.of_gradients[i].defined()) {
        newest_.of_gradients[i].copy_(found.of_gradients[i].reshape(newest_.of_gradients[i].sizes()));
      }
    }
    old_ = Residuals();
    alignment_ = gradients.alignment;
  }
  for (size_t i = 0; i < gradients.segments.size(); ++i) {
    gradients.segments[i].operand = newest_.of_gradients[i].data_ptr();
    if (i < stand_in.size() && stand_in[i]) {
      before_.emplace(i, newest_.of_gradients[i].clone());
    }
  }
  if (keep != Keep::kNothing) {
    keep_old(gradients, keep);
  }
  gradients.residual = newest_.memory;
}

// Residuals lie as the gradients do on the wire, so that a sum's values find their residuals at the same offsets.
ErrorFeedback::Residuals ErrorFeedback::new_residuals(const FlatGradients& gradients) {
  const at::TensorOptions options = gradients.grads.front().options();
  Residuals made{at::zeros({gradients.num_values}, options.dtype(compute_dtype(gradients.grads.front().scalar_type()))),
                 {}};
  for (size_t i = 0; i < gradients.grads.size(); ++i) {
    made.of_gradients.push_back(made.memory.narrow(0, gradients.segments[i].offset, gradients.segments[i].numel)
                                    .as_strided(gradients.grads[i].sizes(), gradients.grads[i].strides()));
  }
  return made;
}

// New memory in each step would cost page faults, and a copy another pass over it.
void ErrorFeedback::keep_old(FlatGradients& gradients, Keep keep) {
  if (!old_.memory.defined()) {
    old_ = new_residuals(gradients);
  }
  if (keep == Keep::kCopy) {
    old_.memory.copy_(newest_.memory);
  } else {
    std::swap(old_, newest_);
    gradients.residual_shift =
        static_cast<std::byte*>(newest_.memory.data_ptr()) - static_cast<std::byte*>(old_.memory.data_ptr());
  }
  has_old_ = true;
}

void ErrorFeedback::roll_back() {
  before_.clear();
  if (std::exchange(has_old_, false)) {
    newest_.memory.copy_(old_.memory);
  }
}

void ErrorFeedback::restore(size_t index) {
  if (const auto before = before_.find(index); before != before_.end()) {
    newest_.of_gradients[index].copy_(before->second);
  }
}

std::vector<at::Tensor> ErrorFeedback::residuals() const { return flat_clones(newest_.of_gradients); }

void ErrorFeedback::set_residuals(const std::vector<at::Tensor>& residuals) {
  before_.clear();
  has_old_ = false;
  if (residuals.empty() && newest_.memory.defined()) {
    newest_.memory.zero_();
    return;
  }
  if (!fit(residuals)) {
    *this = ErrorFeedback();
    newest_.of_gradients = flat_clones(residuals);
    return;
  }
  for (size_t i = 0; i < residuals.size(); ++i) {
    const at::Tensor& own = newest_.of_gradients[i];
    if (residuals[i].defined()) {
      own.copy_(residuals[i].reshape(own.sizes()));
    } else {
      own.zero_();
    }
  }
}

// Whether the residuals can be written to the memory of those that there are.
bool ErrorFeedback::fit(const std::vector<at::Tensor>& residuals) const {
  const auto& own = newest_.of_gradients;
  return newest_.memory.defined() && residuals.size() == own.size() &&
         std::equal(residuals.begin(), residuals.end(), own.begin(), [&](const auto& one, const auto& other) {
           return !one.defined() ||
                  (one.numel() == other.numel() && one.options().type_equal(newest_.memory.options()));
         });
}

}  // namespace fastsync
