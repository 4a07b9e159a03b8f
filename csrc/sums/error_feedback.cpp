#include "sums/error_feedback.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace fastsync {

namespace {

std::vector<at::Tensor> flat_clones(std::vector<at::Tensor> tensors) {
  std::transform(tensors.begin(), tensors.end(), tensors.begin(), [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.clone(at::MemoryFormat::Contiguous).view({-1}) : tensor;
  });
  return tensors;
}

}  // namespace

void ErrorFeedback::lend(FlatGradients& gradients, const std::vector<bool>& stand_in) {
  before_.clear();
  if (!memory_.defined() || memory_.numel() != gradients.num_values || alignment_ != gradients.alignment) {
    lay_out(gradients);
  }
  gradients.residual = memory_;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    gradients.segments[i].residual = residuals_[i].data_ptr();
    if (i < stand_in.size() && stand_in[i]) {
      before_.emplace(i, residuals_[i].clone());
    }
  }
}

// Residuals lie as the gradients do on the wire, so that a sum's values find their residuals at the same offsets.
void ErrorFeedback::lay_out(const FlatGradients& gradients) {
  const at::Tensor& like = gradients.grads.front();
  memory_ = at::zeros({gradients.num_values}, like.options().dtype(compute_dtype(like.scalar_type())));
  alignment_ = gradients.alignment;
  residuals_.resize(gradients.grads.size());
  for (size_t i = 0; i < residuals_.size(); ++i) {
    const at::Tensor& gradient = gradients.grads[i];
    const at::Tensor laid_out = memory_.narrow(0, gradients.segments[i].offset, gradients.segments[i].numel)
                                    .as_strided(gradient.sizes(), gradient.strides());
    residuals_[i] = residuals_[i].defined() ? laid_out.copy_(residuals_[i].reshape(gradient.sizes())) : laid_out;
  }
}

void ErrorFeedback::take_back(size_t index) {
  if (const auto before = before_.find(index); before != before_.end()) {
    residuals_[index].copy_(before->second);
  }
}

std::vector<at::Tensor> ErrorFeedback::residuals() const { return flat_clones(residuals_); }

// New memory in each step would cost page faults.
std::vector<at::Tensor> ErrorFeedback::snapshot() {
  if (!memory_.defined()) {
    return residuals();
  }
  if (!snapshot_.defined() || snapshot_.numel() != memory_.numel() || snapshot_.dtype() != memory_.dtype()) {
    snapshot_ = at::empty_like(memory_);
  }
  snapshot_.copy_(memory_);
  std::vector<at::Tensor> copies;
  for (const at::Tensor& residual : residuals_) {
    copies.push_back(snapshot_.as_strided(residual.sizes(), residual.strides(), residual.storage_offset()));
  }
  return copies;
}

void ErrorFeedback::set_residuals(const std::vector<at::Tensor>& residuals) {
  before_.clear();
  if (residuals.empty() && memory_.defined()) {
    memory_.zero_();
    return;
  }
  if (!fit(residuals)) {
    *this = ErrorFeedback();
    residuals_ = flat_clones(residuals);
    return;
  }
  for (size_t i = 0; i < residuals_.size(); ++i) {
    if (residuals[i].defined()) {
      residuals_[i].copy_(residuals[i].reshape(residuals_[i].sizes()));
    } else {
      residuals_[i].zero_();
    }
  }
}

// Whether the residuals can be written to the memory of those that there are.
bool ErrorFeedback::fit(const std::vector<at::Tensor>& residuals) const {
  return memory_.defined() && residuals.size() == residuals_.size() &&
         std::equal(residuals.begin(), residuals.end(), residuals_.begin(), [&](const auto& one, const auto& other) {
           return !one.defined() || (one.numel() == other.numel() && one.options().type_equal(memory_.options()));
         });
}

}  // namespace fastsync
