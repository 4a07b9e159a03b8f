#include "engine/engine_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>
#include <utility>

#include "passes/backend.h"
#include "transport/agreement.h"
#include "transport/host.h"

namespace fastsync {

EngineState::EngineState(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, const std::string& join)
    : group_(std::move(group)), liveness_(std::make_shared<Liveness>(group_, name, join)) {
  Host::check_setting();
}

void EngineState::check_not_forked(const char* way_out) const {
  TORCH_CHECK(getpid() == process_id_, "fastsync: this process was forked from the one that attached the engine, and ",
              "the process group did not come along; ", way_out);
}

// ---- settings and agreement -------------------------------------------------------------------------------------

void EngineState::set_compressions(std::shared_ptr<const CompressionTable> compressions) {
  compressions_ = std::move(compressions);
  agree_anew("its compression was set");
}

void EngineState::agree_anew(std::string why) {
  version_ += 1;
  why_agree_ = std::move(why);
}

bool EngineState::have_agreed(const Agreement& agreement,
                              const std::shared_ptr<const CompressionTable>& compressions) const {
  return agreement.compressions == compressions && agreement.version == version_;
}

void EngineState::agree(Agreement& agreement, const std::string& what,
                        const std::shared_ptr<const CompressionTable>& compressions, int64_t step,
                        const std::string& lines, c10::Device device) {
  const std::string why = agreement.number < 0 ? "it is new" : why_agree_;
  liveness_->agree(step, why, agreement.number);
  const std::string text =
      c10::str(compressions->description, "\nstep ", step, "\n", saved_.description(), "\n", lines);
  const auto look = [&] { check_others_come(why); };
  wait_for_ranks(what, [&] { agreement.number = check_agreement(group_, text, device, "what to synchronise", look); });
  agreement.compressions = compressions;
  agreement.version = version_;
}

void EngineState::check_others_come(const std::string& why) const {
  const std::vector<int64_t> past = liveness_->ranks_past_agreement();
  if (past.empty()) {
    return;
  }
  give_up();
  TORCH_CHECK(false, past.size() == 1 ? "rank " : "ranks ", c10::Join(", ", past), " averaged without agreeing anew, ",
              "so this rank waits in vain. What it did and they did not: ", why);
}

void EngineState::give_up() const {
  for (const auto& bucket : known_buckets_) {
    bucket->give_up();
  }
}

void EngineState::wait_for_ranks(const std::string& what, const std::function<void()>& call) {
  try {
    guard(c10::str("fastsync: ", what, " failed on rank ", group_->getRank(), " of ", group_->getSize(), ": "),
          *liveness_, call);
  } catch (const c10::ValueError&) {
    liveness_->rest();
    throw;
  }
}

// ---- buckets, and what is saved of them -------------------------------------------------------------------------

std::shared_ptr<BucketSync> EngineState::find_or_add(const std::vector<at::Tensor>& parameters, const std::string& name,
                                                     c10::Device device) {
  const auto same = [](const ParameterId& id, const at::Tensor& parameter) {
    return id._unsafe_get_target() == parameter.unsafeGetTensorImpl();
  };
  for (const auto& bucket : known_buckets_) {
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
  forget_buckets([&](const BucketSync& bucket) {
    return std::any_of(bucket.parameters.begin(), bucket.parameters.end(),
                       [&](const ParameterId& id) { return id.expired() || moved.contains(id._unsafe_get_target()); });
  });
  return add_bucket(std::move(ids), std::make_shared<Agreement>(*group_, name), name, device);
}

std::shared_ptr<BucketSync> EngineState::add_bucket(std::vector<ParameterId> parameters,
                                                    std::shared_ptr<Agreement> agreement, const std::string& name,
                                                    c10::Device device) {
  auto bucket =
      std::make_shared<BucketSync>(group_, name, device, liveness_, std::move(parameters), std::move(agreement));
  begin_with_saved(*bucket);
  known_buckets_.push_back(bucket);
  return bucket;
}

void EngineState::forget_buckets(const std::function<bool(const BucketSync&)>& which) {
  const auto is_forgotten = [&](const auto& bucket) { return which(*bucket); };
  std::erase_if(newest_buckets_, is_forgotten);
  times_.collect();
  std::erase_if(known_buckets_, [&](const auto& bucket) {
    const bool forgotten = is_forgotten(bucket);
    if (forgotten) {
      bucket->replace();
      saved_.record_residuals(bucket->parameters, bucket->feedback().residuals());
      forgotten_totals_.add(*bucket->totals());
    }
    return forgotten;
  });
}

std::vector<SavedState::Row> EngineState::saved() {
  SavedState newest = saved_;  // which holds until its parameters have been synchronised
  for (const auto& bucket : known_buckets_) {
    newest.record_scale(bucket->parameters, bucket->scale());
    newest.record_residuals(bucket->parameters, bucket->feedback().residuals());
  }
  return newest.rows();
}

void EngineState::set_saved(const std::vector<SavedState::Row>& rows) {
  saved_ = SavedState(rows);
  agree_anew("a state was loaded");
  for (const auto& bucket : known_buckets_) {
    begin_with_saved(*bucket);
  }
}

void EngineState::begin_with_saved(BucketSync& bucket) {
  bucket.set_scale(saved_.smallest_scale(bucket.parameters, bucket.device()));
  bucket.feedback().set_residuals(saved_.take_residuals(bucket.parameters, bucket.device()));
}

// ---- steps, and what they have cost -----------------------------------------------------------------------------

std::shared_ptr<Stopwatch> EngineState::start_bucket(const BucketSync& bucket) {
  const c10::Device device = bucket.device();
  is_captured_ = is_capturing(device);
  return times_.start_bucket(bucket.totals(), device);
}

at::Tensor EngineState::grad_stats() {
  TORCH_CHECK(!newest_buckets_.empty(),
              "fastsync: no gradients have been synchronised yet; statistics come with a backward()");
  std::vector<at::Tensor> rows;
  for (const auto& bucket : newest_buckets_) {
    rows.push_back(bucket->stats().to(newest_buckets_.front()->device(), /*non_blocking=*/true));
  }
  return rows.size() == 1 ? rows.front().clone() : at::stack(rows).sum(0);
}

SyncTotals EngineState::totals() {
  times_.end_step();  // under fully_shard nothing else may
  times_.collect();
  SyncTotals totals;
  for (const auto& bucket : newest_buckets_) {
    totals.buckets.push_back(*bucket->totals());
  }
  totals.all = forgotten_totals_;
  for (const auto& bucket : known_buckets_) {
    totals.all.add(*bucket->totals());
  }
  totals.num_steps = num_steps();
  std::tie(totals.num_timed_steps, totals.exposed_time) = times_.exposed();
  return totals;
}

}  // namespace fastsync
