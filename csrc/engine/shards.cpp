#include "engine/shards.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "engine/unseen_writes.h"
#include "passes/backend.h"
#include "passes/cuda_graphs.h"

namespace fastsync {

// ---- between steps --------------------------------------------------------------------------------------------------

std::vector<Shards::Piece> Shards::pieces() {
  std::vector<Piece> pieces;
  for (const LayoutBucket& each : layout_.buckets) {
    for (const ShardPiece& piece : each.bucket->shard()) {
      pieces.emplace_back(each.parameters[piece.gradient], piece.begin, piece.means);
    }
  }
  return pieces;
}

int64_t Shards::pieces_number() {
  int64_t newest = 0;
  for (const LayoutBucket& each : layout_.buckets) {
    newest = std::max(newest, each.bucket->shard_number());
  }
  return newest;
}

void Shards::meet() {
  engine_.wait_for_ranks("the step of the optimizer", [&] { group_->barrier(); });
}

std::vector<std::vector<std::vector<Shards::Place>>> Shards::places() {
  std::vector<std::vector<std::vector<Place>>> places;
  for (const LayoutBucket& each : layout_.buckets) {
    auto& of_bucket = places.emplace_back();
    for (const auto& shard : each.bucket->shards()) {
      auto& of_rank = of_bucket.emplace_back();
      for (const ShardPiece& piece : shard) {
        of_rank.emplace_back(each.parameters[piece.gradient], piece.begin, piece.numel);
      }
    }
  }
  return places;
}

std::vector<bool> Shards::have_other_values() {
  std::vector<at::Tensor> noted;
  std::vector<at::Tensor> current;
  for (const Parameter& parameter : parameters_) {
    noted.push_back(parameter.sample);
    current.push_back(sample_of(parameter.lock().grad()));
  }
  return differ(noted, current);
}

std::vector<std::vector<double>> Shards::compare(const std::vector<double>& numbers, const std::string& what) {
  engine_.check_not_forked("step in the process that attached it, or call detach() in the child");
  std::vector<std::vector<double>> all;
  engine_.wait_for_ranks(what, [&] {
    group_->begin_all_gather(numbers);
    all = group_->end_all_gather();
    check_count(all, numbers.size());
  });
  return all;
}

void Shards::check_count(const std::vector<std::vector<double>>& all, size_t count) const {
  for (const auto& theirs : all) {
    TORCH_CHECK(theirs.size() == count, "another rank is not there, but averages gradients or is elsewhere in the ",
                "optimizer: every rank has to call optimizer.step() after the same backwards, and its state_dict() ",
                "too where ranks share no memory");
  }
}

// ---- late numbers ---------------------------------------------------------------------------------------------------

void Shards::check_not_captured() {
  TORCH_CHECK(!are_kept() || !group_->on_device() || !is_capturing(group_->on_device()->device()),
              "fastsync: a CUDA graph cannot hold a backward or a step with shard_optimizer, because in each step the ",
              "host hears of the other ranks: train without the graph, or leave shard_optimizer out, on every rank");
}

at::Tensor Shards::note_other_values(const std::vector<size_t>& parameters) {
  const auto length = [](const at::Tensor& sample) { return sample.defined() ? sample.nbytes() : 0; };
  noted_.clear();
  resized_.clear();
  std::vector<at::Tensor> then;
  std::vector<at::Tensor> now;
  for (const size_t index : parameters) {
    const at::Tensor before = parameters_[index].sample;
    const at::Tensor current = sample_of(parameters_[index].lock().grad());
    if (length(before) != length(current)) {
      resized_.push_back(index);
      continue;
    }
    then.push_back(before);
    now.push_back(current);
    noted_.emplace_back(index, length(before));
  }
  const at::Tensor differ = bytes_that_differ(then, now);
  noted_differ_ = differ.defined() ? std::make_optional<HostCopy>(differ) : std::nullopt;
  const auto options = at::TensorOptions().dtype(at::kDouble).device(group_->on_device()->device());
  const at::Tensor num_resized = at::full({1}, static_cast<double>(resized_.size()), options);
  return differ.defined() ? num_resized + differ.sum(/*dim=*/0, /*keepdim=*/true, at::kDouble) : num_resized;
}

std::vector<size_t> Shards::noted_other_values() {
  std::vector<size_t> found = resized_;
  const bool* differs = noted_differ_ ? noted_differ_->wait().const_data_ptr<bool>() : nullptr;
  for (const auto& [index, bytes] : noted_) {
    if (differs && std::any_of(differs, differs + bytes, [](bool each) { return each; })) {
      found.push_back(index);
    }
    differs += bytes;
  }
  return found;
}

void Shards::tell(const std::vector<double>& numbers, const at::Tensor& on_device, const std::string& what) {
  engine_.check_not_forked("step in the process that attached it, or call detach() in the child");
  ShardGroupByMessages& group = *group_->on_device();
  engine_.wait_for_ranks(what, [&] {
    const at::Tensor all = at::cat({to_device(numbers, group.device()), on_device});
    num_told_ = all.numel();
    group.begin_all_gather(all);
    told_.emplace(group.end_on_device());
  });
}

std::vector<std::vector<double>> Shards::hear() {
  TORCH_INTERNAL_ASSERT(told_, "tell() comes first");
  const auto all = numbers_in(told_->wait());
  told_.reset();
  check_count(all, num_told_);
  return all;
}

// ---- in a step ------------------------------------------------------------------------------------------------------

void Shards::check(const Sums& /*sums*/, const StepInfo& step) {
  if (!are_kept()) {
    return;
  }
  if (!step.has_failed) {
    find_means();
  }
  tell_stats(step.has_failed);
  hear_stats();
}

void Shards::leave_behind() {
  if (are_kept()) {
    tell_stats(/*has_failed=*/true);
  }
}

// After a failure it may be called twice: first early, so that nobody waits for this rank.
void Shards::tell_stats(bool has_failed) {
  if (has_told_stats_) {
    return;
  }
  std::vector<at::Tensor> stats;
  for (const LayoutBucket& each : layout_.buckets) {
    stats.push_back(each.bucket->stats());
  }
  const at::Tensor own = at::stack(stats);
  if (has_failed) {
    own.select(1, kNumNonfinite).fill_(1.0);
  }
  if (auto* const on_device = group_->on_device()) {
    on_device->begin_all_gather(own.flatten());
  } else {
    const auto* const numbers = own.const_data_ptr<double>();
    group_->begin_all_gather(std::vector<double>(numbers, numbers + own.numel()));
  }
  has_told_stats_ = true;  // not if telling has failed
}

void Shards::hear_stats() {
  if (auto* const on_device = group_->on_device()) {
    hear_stats_on(*on_device);
    return;
  }
  std::vector<std::vector<double>> all;
  engine_.wait_for_ranks("adding up the norm of the gradients", [&] {
    all = group_->end_all_gather();
    for (const auto& theirs : all) {
      TORCH_CHECK(theirs.size() == kNumStats * layout_.buckets.size(), "another rank steps with the optimizer, where ",
                  "this rank averages gradients: every rank has to call optimizer.step() after the same backwards");
    }
  });
  for (size_t i = 0; i < layout_.buckets.size(); ++i) {
    std::vector<const double*> stats;
    for (const auto& theirs : all) {
      stats.push_back(theirs.data() + i * kNumStats);
    }
    layout_.buckets[i].bucket->take_stats(stats);
  }
}

// Nobody looks how many numbers another rank has told: a rank that is elsewhere has not come past the sums before.
void Shards::hear_stats_on(ShardGroupByMessages& device) {
  at::Tensor all;
  engine_.wait_for_ranks("adding up the norm of the gradients", [&] {
    const auto num_buckets = std::ssize(layout_.buckets);
    all = device.end_on_device().narrow(1, 1, num_buckets * kNumStats).unflatten(1, {num_buckets, kNumStats});
  });
  for (size_t i = 0; i < layout_.buckets.size(); ++i) {
    layout_.buckets[i].bucket->take_stats(all.select(1, static_cast<int64_t>(i)));
  }
  num_nonfinite_ = all.select(2, kNumNonfinite).sum();
}

// A parameter has means if some rank has a new gradient, or if all have kept one. What comes of others are residuals,
// or gradients that only some ranks have kept.
void Shards::find_means() {
  have_means_.assign(parameters_.size(), false);
  for (const LayoutBucket& each : layout_.buckets) {
    for (size_t i = 0; i < each.parameters.size(); ++i) {
      const size_t index = each.parameters[i];
      const size_t flag = layout_.flag_of(index);
      const bool is_new = flags_.on_some_rank(flag, parameters_[index].name);
      have_means_[index] = is_new || flags_.is_kept_everywhere(flag);
      if (!have_means_[index]) {
        each.bucket->feedback().restore(i);
        each.bucket->drop_from_shard(i);
      }
    }
  }
}

void Shards::keep(std::vector<Gradient>& gradients) const {
  if (needs_spoiled(gradients)) {
    const auto with_means = std::ranges::find(have_means_, true) - have_means_.begin();
    gradients.at(with_means).make_spoiled();
  }
  for (Gradient& gradient : gradients) {
    gradient.keep();
    gradient.parameter().sample = sample_of(grad_of(gradient.tensor()));
  }
}

// Spoils a gradient if a mean is not finite. Returns whether there is none to spoil. On a device the host waits only to
// tell that.
bool Shards::needs_spoiled(const std::vector<Gradient>& gradients) const {
  if (group_->on_device()) {
    const at::Tensor is_bad = num_nonfinite_.ne(0.0);
    return std::ranges::none_of(gradients, [&](const Gradient& each) { return each.spoil_where(is_bad); }) &&
           is_bad.item<bool>();
  }
  const bool is_finite = std::ranges::all_of(layout_.buckets, [](const LayoutBucket& each) {
    return each.bucket->stats().select(0, kNumNonfinite).item<double>() == 0.0;
  });
  return !is_finite && std::ranges::none_of(gradients, [](const Gradient& each) { return each.spoil(); });
}

}  // namespace fastsync
