#include "sums/error_feedback.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace fastsync {

namespace {

at::Tensor no_residual(const at::Tensor& grad) {
  return at::zeros({grad.numel()}, grad.options().dtype(compute_dtype(grad.scalar_type())));
}

}  // namespace

void ErrorFeedback::lend(Bucket& bucket, bool is_on, const Owned& owned, const std::vector<bool>& stand_in) {
  before_.clear();
  if (!is_on && residuals_.empty()) {
    return;
  }
  residuals_.resize(bucket.grads.size());
  for (size_t i = 0; is_on && i < residuals_.size(); ++i) {
    if (!residuals_[i].defined()) {
      residuals_[i] = no_residual(bucket.grads[i]);
    }
  }
  hand_over(owned);
  bucket.residuals = residuals_;
  bucket.keeps_losses = is_on;
  bucket.residual_of_sums = owned_residual_;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    const bool stands_in = i < stand_in.size() && stand_in[i];
    if (is_on && stands_in) {
      before_.emplace(i, kept(i));
    }
    if (residuals_[i].defined() && (is_on || !stands_in)) {
      bucket.segments[i].residual = residuals_[i].data_ptr();
    }
    if (!is_on && !stands_in) {
      residuals_[i].reset();
    }
  }
  if (std::none_of(residuals_.begin(), residuals_.end(), std::mem_fn(&at::Tensor::defined))) {
    residuals_.clear();
  }
}

ErrorFeedback::Kept ErrorFeedback::kept(size_t index) const {
  Kept kept{residuals_[index].clone(), {}};
  for (const auto& part : owned_.parts) {
    if (part.segment == index) {
      kept.of_sums.push_back(owned_residual_.narrow(0, part.place, part.count).clone());
    }
  }
  return kept;
}

void ErrorFeedback::take_back(size_t index) {
  const auto before = before_.find(index);
  if (before == before_.end()) {
    return;
  }
  residuals_[index].copy_(before->second.own);
  auto of_sums = before->second.of_sums.begin();
  for (const auto& part : owned_.parts) {
    if (part.segment == index) {
      owned_residual_.narrow(0, part.place, part.count).copy_(*of_sums++);
    }
  }
}

void ErrorFeedback::rescale(const at::Tensor& factor) {
  for (const auto* residuals : {&residuals_, &loaded_residuals_of_sums_}) {
    for (const at::Tensor& residual : *residuals) {
      if (residual.defined()) {
        residual.mul_(factor.to(residual.device()));
      }
    }
  }
  if (owned_residual_.defined()) {
    owned_residual_.mul_(factor.to(owned_residual_.device()));
  }
}

// The residuals of the sums go to what is owned now. What is not goes back to what this rank will pack: num_ranks
// times, for it is part of a mean over so many.
void ErrorFeedback::hand_over(const Owned& now_owned) {
  if (now_owned == owned_ && loaded_residuals_of_sums_.empty()) {
    return;
  }
  auto of_sums = loaded_residuals_of_sums_.empty() ? residuals_of_sums() : std::exchange(loaded_residuals_of_sums_, {});
  owned_ = now_owned;
  owned_residual_ = owned_.parts.empty() ? at::Tensor() : at::zeros({owned_.num_values}, residuals_.front().options());
  if (of_sums.empty()) {
    return;
  }
  for (const auto& part : owned_.parts) {
    const at::Tensor values = of_sums[part.segment].narrow(0, part.first, part.count);
    owned_residual_.narrow(0, part.place, part.count).copy_(values);
    values.zero_();
  }
  for (size_t i = 0; i < residuals_.size(); ++i) {
    residuals_[i].add_(of_sums[i], static_cast<double>(num_ranks_));
  }
}

// What is finite stays finite.
void ErrorFeedback::add_to(const std::vector<at::Tensor>& grads) {
  if (residuals_.empty()) {
    return;
  }
  hand_over({});
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
}

// One for each gradient, with zeros where other ranks own the sums; none where nothing is owned.
std::vector<at::Tensor> ErrorFeedback::residuals_of_sums() const {
  std::vector<at::Tensor> of_sums;
  if (!owned_.parts.empty()) {
    std::transform(residuals_.begin(), residuals_.end(), std::back_inserter(of_sums),
                   [](const at::Tensor& residual) { return at::zeros_like(residual); });
  }
  for (const auto& part : owned_.parts) {
    of_sums[part.segment].narrow(0, part.first, part.count).copy_(owned_residual_.narrow(0, part.place, part.count));
  }
  return of_sums;
}

std::vector<Residual> ErrorFeedback::residuals() const {
  const auto of_sums = loaded_residuals_of_sums_.empty() ? residuals_of_sums() : loaded_residuals_of_sums_;
  std::vector<Residual> residuals;
  for (size_t i = 0; i < residuals_.size(); ++i) {
    residuals.push_back({residuals_[i].defined() ? residuals_[i].clone() : at::Tensor(),
                         of_sums.empty() ? at::Tensor() : of_sums[i].clone()});
  }
  return residuals;
}

void ErrorFeedback::set_residuals(const std::vector<Residual>& residuals) {
  *this = ErrorFeedback(num_ranks_);
  for (const Residual& residual : residuals) {
    residuals_.push_back(residual.own.clone());
    loaded_residuals_of_sums_.push_back(residual.of_sums.defined() ? residual.of_sums.clone()
                                                                   : at::zeros_like(residual.own));
  }
}

}  // namespace fastsync
