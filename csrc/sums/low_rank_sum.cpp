#include "sums/low_rank_sum.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "transport/streams.h"

namespace fastsync {

namespace {

constexpr uint64_t kSeed = 1905'13727;

// Makes the columns of each matrix of a batch orthonormal. Columns that depend on others, and zeros, become any that
// are orthonormal.
at::Tensor orthonormal(const at::Tensor& matrices) { return std::get<0>(at::linalg_qr(matrices, "reduced")); }

}  // namespace

// Dimensions of size 1 have no place in memory. All ranks have the same strides, because they agree on them.
std::optional<Sides> low_rank_sides(const at::Tensor& tensor, int64_t rank) {
  int64_t rows = 1;
  int64_t largest_stride = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) > largest_stride) {
      rows = tensor.size(dim);
      largest_stride = tensor.stride(dim);
    }
  }
  const Sides sides{rows, tensor.numel() / rows};
  return rank * (sides.rows + sides.columns) < tensor.numel() ? std::optional(sides) : std::nullopt;
}

at::Tensor first_factor(int64_t columns, int64_t rank, const at::TensorOptions& options) {
  return at::randn({columns, rank}, at::detail::createCPUGenerator(kSeed), options.device(c10::kCPU))
      .to(options.device());
}

LowRankSum::LowRankSum(FlatGradients gradients, LowRankState& state, int64_t rank, MakeSum make_sum)
    : SumWork(std::move(gradients)), state_(state), make_sum_(std::move(make_sum)) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions options = gradients_.residual.options();
  memory_ = take_memory(state_.matrices, gradients_.num_values);
  state_.factors.resize(gradients_.grads.size());
  std::vector<at::Tensor> sent;
  for (size_t i = 0; i < gradients_.grads.size(); ++i) {
    at::Tensor& factor = state_.factors[i];
    const auto sides = low_rank_sides(gradients_.grads[i], rank);
    if (!sides) {
      factor.reset();
      whole_.push_back(i);
      sent.push_back(values(i));
      continue;
    }
    if (!factor.defined() || factor.sizes() != at::IntArrayRef({sides->columns, rank}) ||
        factor.scalar_type() != gradients_.residual.scalar_type()) {
      factor = first_factor(sides->columns, rank, options);
    }
    group_of(*sides).indices.push_back(i);
  }
  for (Group& group : groups_) {
    std::vector<at::Tensor> factors;
    for (const size_t index : group.indices) {
      factors.push_back(state_.factors[index]);
    }
    group.right = at::stack(factors);
    group.left = at::empty({group.right.size(0), group.sides.rows, rank}, options);
    sent.push_back(group.left);
  }
  left_sum_ = make_sum_(std::move(sent), state_.of_left, gradients_.side_values);
}

LowRankSum::Group& LowRankSum::group_of(Sides sides) {
  const auto known = std::ranges::find(groups_, sides, &Group::sides);
  return known != groups_.end() ? *known : groups_.emplace_back(Group{sides});
}

// Returns memory with any content. On a CPU it is kept from sum to sum.
at::Tensor LowRankSum::take_memory(at::Tensor& kept, int64_t numel) const {
  const at::TensorOptions options = gradients_.residual.options();
  if (!gradients_.device.is_cpu()) {
    return at::empty({numel}, options);
  }
  if (!kept.defined() || kept.numel() != numel || kept.scalar_type() != gradients_.residual.scalar_type()) {
    kept = at::empty({numel}, options);
  }
  return kept;
}

// Returns what belongs to a gradient, in the order of the gradient's memory.
at::Tensor LowRankSum::part(const at::Tensor& memory, size_t index) const {
  return memory.narrow(0, gradients_.segments[index].offset, gradients_.segments[index].numel);
}

at::Tensor LowRankSum::matrix(const Group& group, size_t place) const {
  return values(group.indices[place]).view({group.sides.rows, group.sides.columns});
}

// ---- left factors ---------------------------------------------------------------------------------------------------

void LowRankSum::send() {
  RECORD_FUNCTION("fastsync::factors", {});
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients_.grads.size(); ++i) {
    gather(i);
  }
  for (const Group& group : groups_) {
    const at::Tensor right = orthonormal(group.right);
    for (size_t i = 0; i < group.indices.size(); ++i) {
      at::Tensor left = group.left[static_cast<int64_t>(i)];
      at::mm_out(left, matrix(group, i), right[static_cast<int64_t>(i)]);
    }
  }
  left_sum_->send();
}

// A gradient whose weight is 0 does not count, even if it is nan. Residuals stay what they are until the sum has come.
void LowRankSum::gather(size_t index) const {
  at::Tensor gradient = gradients_.grads[index];
  const auto like = [&](const at::Tensor& flat) { return flat.as_strided(gradient.sizes(), gradient.strides()); };
  at::Tensor sum = like(values(index));
  const at::Tensor lost = like(residual(index));
  if (gradients_.weight.defined()) {
    const at::Tensor weight = gradients_.weight.squeeze(0);
    gradient = at::where(weight == 0.0, 0.0, gradient.to(sum.scalar_type()) * weight);
  }
  at::add_out(sum, lost, gradient);
}

// ---- right factors, and the result ----------------------------------------------------------------------------------

void LowRankSum::receive(const std::function<void()>& on_reduced) {
  const at::NoGradGuard no_grad;
  const auto in_any_case = c10::make_scope_exit([this] { let_go_of_gradients(); });
  left_sum_->receive(groups_.empty() ? on_reduced : [] {});
  gradients_.side_values = left_sum_->gradients().side_values;
  if (!groups_.empty()) {
    sum_right_factors(on_reduced);
  }
  for (const size_t index : whole_) {
    unpack(index, values(index));
    residual(index).zero_();
  }
  int64_t largest = 0;
  for (const Group& group : groups_) {
    largest = std::max(largest, group.sides.rows * group.sides.columns);
  }
  const at::Tensor memory = take_memory(state_.product, largest);
  for (const Group& group : groups_) {
    const at::Tensor is_finite = group.right.isfinite().flatten(1).all(1);
    const auto [rows, columns] = group.sides;
    const at::Tensor product = memory.narrow(0, 0, rows * columns).view({rows, columns});
    for (size_t i = 0; i < group.indices.size(); ++i) {
      unpack_product(group, i, is_finite, product);
    }
  }
  use_memory_on_current_stream();
}

void LowRankSum::sum_right_factors(const std::function<void()>& on_reduced) {
  RECORD_FUNCTION("fastsync::factors", {});
  std::vector<at::Tensor> sent;
  for (Group& group : groups_) {
    use_on_current_stream(group.left);
    use_on_current_stream(group.right);
    group.left = orthonormal(group.left);
    group.right = at::empty_like(group.right);
    for (size_t i = 0; i < group.indices.size(); ++i) {
      at::Tensor right = group.right[static_cast<int64_t>(i)];
      at::mm_out(right, matrix(group, i).t(), group.left[static_cast<int64_t>(i)]);
    }
    sent.push_back(group.right);
  }
  right_sum_ = make_sum_(std::move(sent), state_.of_right, /*side_values=*/{});
  right_sum_->send();
  right_sum_->receive(on_reduced);
}

// A value that the gradient's type does not hold becomes the largest one.
void LowRankSum::unpack(size_t index, const at::Tensor& values) const {
  const double limit = saturation_limit(gradients_.grad_dtype, /*world_size=*/1);
  const at::ScalarType dtype = scalar_type_of(gradients_.grad_dtype);
  const at::Tensor from = values.scalar_type() == dtype ? values : values.clamp(-limit, limit).to(dtype);
  const Segment& segment = gradients_.segments[index];
  const size_t first = whole_.empty() ? groups_.front().indices.front() : whole_.front();
  const size_t last = groups_.empty() ? whole_.back() : groups_.back().indices.back();
  gradients_.unpack({{segment.offset, segment.offset + segment.numel, /*offset=*/0}}, from.const_data_ptr(),
                    /*num_wires=*/1, /*stride=*/0, /*factor=*/1.0, {index == first, index == last});
}

// Writes P Q^T to the gradient, by way of `product`, and M without it to the residual. If it is not finite, residual
// and factor stay what they were. So does the factor of zeros, which tells nothing.
void LowRankSum::unpack_product(const Group& group, size_t place, const at::Tensor& is_finite,
                                at::Tensor product) const {
  const auto row = static_cast<int64_t>(place);
  const size_t index = group.indices[place];
  at::mm_out(product, group.left[row], group.right[row].t());
  unpack(index, product);
  const at::Tensor own = matrix(group, place);
  at::Tensor lost = residual(index).view_as(own);
  if (!own.is_cpu()) {
    lost.copy_(at::where(is_finite[row], own.sub(product, 1.0 / gradients_.mean_factor), lost));
  } else if (is_finite[row].item<bool>()) {
    at::sub_out(lost, own, product, 1.0 / gradients_.mean_factor);
  }
  at::Tensor& factor = state_.factors[index];
  factor = at::where(is_finite[row].logical_and(group.right[row].any()), group.right[row], factor);
}

int64_t LowRankSum::sent_bytes() const { return left_sum_->sent_bytes() + (right_sum_ ? right_sum_->sent_bytes() : 0); }

}  // namespace fastsync
