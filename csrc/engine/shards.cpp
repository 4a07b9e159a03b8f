#include "engine/shards.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "engine/unseen_writes.h"

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
    for (const auto& theirs : all) {
      TORCH_CHECK(theirs.size() == numbers.size(), "another rank is not there, but averages gradients or is elsewhere ",
                  "in the optimizer: every rank has to call optimizer.step() after the same backwards, and its ",
                  "state_dict() too where ranks share no memory");
    }
  });
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
  const at::Tensor on_host = at::stack(stats).cpu();
  if (has_failed) {
    on_host.select(1, kNumNonfinite).fill_(1.0);
  }
  const auto* const numbers = on_host.const_data_ptr<double>();
  group_->begin_all_gather({numbers, numbers + on_host.numel()});
  has_told_stats_ = true;  // not if telling has failed
}

void Shards::hear_stats() {
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
  const bool is_finite = std::ranges::all_of(layout_.buckets, [](const LayoutBucket& each) {
    return each.bucket->stats().select(0, kNumNonfinite).item<double>() == 0.0;
  });
  if (!is_finite && std::ranges::none_of(gradients, [](const Gradient& gradient) { return gradient.spoil(); })) {
    const auto with_means = std::ranges::find(have_means_, true) - have_means_.begin();
    gradients.at(with_means).make_spoiled();
  }
  for (Gradient& gradient : gradients) {
    gradient.keep();
    gradient.parameter().sample = sample_of(grad_of(gradient.tensor()));
  }
}

}  // namespace fastsync
