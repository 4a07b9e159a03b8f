#include "sums/error_feedback.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

namespace fastsync {

void ErrorFeedback::lend(Bucket& bucket, bool is_on, const std::vector<bool>& stand_in) {
  before_.clear();
  if (!is_on && residuals_.empty()) {
    return;
  }
  lay_out(bucket);
  bucket.residual = memory_;
  bucket.keeps_losses = is_on;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    Segment& segment = bucket.segments[i];
    const bool stands_in = i < stand_in.size() && stand_in[i];
    if (is_on && !residuals_[i].defined()) {
      residuals_[i] = memory_.narrow(0, segment.offset, segment.numel).zero_();
    }
    if (is_on && stands_in) {
      before_.emplace(i, residuals_[i].clone());
    }
    if (residuals_[i].defined() && (is_on || !stands_in)) {
      segment.residual = residuals_[i].data_ptr();
    }
    if (!is_on && !stands_in) {
      residuals_[i].reset();
    }
  }
  if (std::none_of(residuals_.begin(), residuals_.end(), std::mem_fn(&at::Tensor::defined))) {
    residuals_.clear();
    memory_.reset();
  }
}

// So that those of a sum's values lie as the sum does.
void ErrorFeedback::lay_out(const Bucket& bucket) {
  if (memory_.defined() && memory_.numel() == bucket.num_values && alignment_ == bucket.alignment) {
    return;
  }
  const at::Tensor& like = bucket.grads.front();
  memory_ = at::zeros({bucket.num_values}, like.options().dtype(compute_dtype(like.scalar_type())));
  alignment_ = bucket.alignment;
  residuals_.resize(bucket.grads.size());
  for (size_t i = 0; i < residuals_.size(); ++i) {
    if (residuals_[i].defined()) {
      const Segment& segment = bucket.segments[i];
      residuals_[i] = memory_.narrow(0, segment.offset, segment.numel).copy_(residuals_[i]);
    }
  }
}

void ErrorFeedback::take_back(size_t index) {
  if (const auto before = before_.find(index); before != before_.end()) {
    residuals_[index].copy_(before->second);
  }
}

// What is finite stays finite.
void ErrorFeedback::add_to(const std::vector<at::Tensor>& grads) {
  if (residuals_.empty()) {
    return;
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!residuals_[i].defined()) {
      continue;
    }
    const at::Tensor flat = grads[i].as_strided({grads[i].numel()}, {1});
    dispatch_grad(dtype_of(flat.scalar_type()), [&](auto zero) {
      const auto largest = static_cast<double>(kLargest<decltype(zero)>);
      flat.copy_(
          at::where(flat.isfinite(), at::add(residuals_[i].to(flat.device()), flat).clamp(-largest, largest), flat));
    });
  }
  residuals_.clear();
  memory_.reset();
}

std::vector<at::Tensor> ErrorFeedback::residuals() const {
  std::vector<at::Tensor> residuals;
  for (const at::Tensor& residual : residuals_) {
    residuals.push_back(residual.defined() ? residual.clone() : residual);
  }
  return residuals;
}

void ErrorFeedback::set_residuals(const std::vector<at::Tensor>& residuals) {
  *this = ErrorFeedback();
  for (const at::Tensor& residual : residuals) {
    residuals_.push_back(residual.defined() ? residual.clone() : residual);
  }
}

}  // namespace fastsync
