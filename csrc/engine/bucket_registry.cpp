#include "engine/bucket_registry.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>

namespace fastsync {

std::shared_ptr<Bucket> BucketRegistry::find_or_add(const std::vector<at::Tensor>& parameters, const std::string& name,
                                                    c10::Device device) {
  const auto same = [](const ParameterId& id, const at::Tensor& parameter) {
    return id._unsafe_get_target() == parameter.unsafeGetTensorImpl();
  };
  for (const auto& bucket : all_) {
    const auto& ids = bucket->parameters;
    if (std::equal(ids.begin(), ids.end(), parameters.begin(), parameters.end(), same)) {
      return bucket;
    }
  }
  std::vector<ParameterId> ids;
  std::unordered_set<const c10::TensorImpl*> moved;
  for (const at::Tensor& parameter : parameters) {
    ids.emplace_back(parameter.getIntrusivePtr());
    moved.insert(parameter.unsafeGetTensorImpl());
  }
  forget([&](const Bucket& bucket) {
    return std::any_of(bucket.parameters.begin(), bucket.parameters.end(),
                       [&](const ParameterId& id) { return id.expired() || moved.contains(id._unsafe_get_target()); });
  });
  return add(std::move(ids), std::make_shared<Agreement>(*group_, name), name, device);
}

std::shared_ptr<Bucket> BucketRegistry::add(std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement,
                                            const std::string& name, c10::Device device) {
  auto bucket = std::make_shared<Bucket>(group_, name, device, liveness_, std::move(parameters), std::move(agreement));
  begin_with_saved(*bucket);
  all_.push_back(bucket);
  return bucket;
}

void BucketRegistry::forget(const std::function<bool(const Bucket&)>& which) {
  const auto is_forgotten = [&](const auto& bucket) { return which(*bucket); };
  std::erase_if(newest_, is_forgotten);
  times_.collect();
  std::erase_if(all_, [&](const auto& bucket) {
    const bool forgotten = is_forgotten(bucket);
    if (forgotten) {
      bucket->replace();
      saved_.record_residuals(bucket->parameters, bucket->feedback().residuals());
      saved_.record_factors(bucket->parameters, bucket->factors());
      forgotten_totals_.add(*bucket->totals());
    }
    return forgotten;
  });
}

void BucketRegistry::save_and_forget() {
  for (const auto& bucket : all_) {
    saved_.record_scale(bucket->parameters, bucket->scale());
  }
  forget([](const Bucket& /*bucket*/) { return true; });
}

std::vector<SavedState::Row> BucketRegistry::saved() const {
  SavedState newest = saved_;  // still holds for parameters that no bucket has synchronised yet
  for (const auto& bucket : all_) {
    newest.record_scale(bucket->parameters, bucket->scale());
    newest.record_residuals(bucket->parameters, bucket->feedback().residuals());
    newest.record_factors(bucket->parameters, bucket->factors());
  }
  return newest.rows();
}

void BucketRegistry::set_saved(const std::vector<SavedState::Row>& rows) {
  saved_ = SavedState(rows);
  for (const auto& bucket : all_) {
    begin_with_saved(*bucket);
  }
}

void BucketRegistry::forget_equal_state(const Agreement& agreement) {
  for (const auto& bucket : all_) {
    if (bucket->agreement.get() == &agreement) {
      bucket->forget_equal_state();
    }
  }
  saved_.forget_equal_state();
}

void BucketRegistry::begin_with_saved(Bucket& bucket) {
  bucket.set_saved(saved_.smallest_scale(bucket.parameters, bucket.device()),
                   saved_.take_residuals(bucket.parameters, bucket.device()),
                   saved_.take_factors(bucket.parameters, bucket.device()));
}

at::Tensor BucketRegistry::grad_stats() const {
  TORCH_CHECK(!newest_.empty(), "fastsync: no gradients have been synchronised yet; statistics come with a backward()");
  std::vector<at::Tensor> rows;
  for (const auto& bucket : newest_) {
    rows.push_back(bucket->stats().to(newest_.front()->device(), /*non_blocking=*/true));
  }
  return rows.size() == 1 ? rows.front().clone() : at::stack(rows).sum(0);
}

SyncTotals BucketRegistry::totals() {
  times_.end_step();  // because under fully_shard nothing else may end it
  times_.collect();
  SyncTotals totals;
  for (const auto& bucket : newest_) {
    totals.buckets.push_back(*bucket->totals());
  }
  totals.all = forgotten_totals_;
  for (const auto& bucket : all_) {
    totals.all.add(*bucket->totals());
  }
  totals.num_steps = times_.num_steps();
  std::tie(totals.num_timed_steps, totals.exposed_time) = times_.exposed();
  return totals;
}

}  // namespace fastsync
