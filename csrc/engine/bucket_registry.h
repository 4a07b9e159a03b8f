// A BucketRegistry holds the buckets of an engine, the state of buckets that the engine no longer has, and the costs of
// steps.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/bucket.h"
#include "engine/saved_state.h"
#include "engine/sync_times.h"

namespace fastsync {

class BucketRegistry {
 public:
  BucketRegistry(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Liveness> liveness)
      : group_(std::move(group)), liveness_(std::move(liveness)) {}

  const std::vector<std::shared_ptr<Bucket>>& all() const { return all_; }

  // Adds a bucket of parameters, which starts with their saved state. The name is for errors.
  std::shared_ptr<Bucket> add(std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement,
                              const std::string& name, c10::Device device);
  // Finds the bucket of exactly these parameters, or adds one with an agreement of its own. A new bucket takes the
  // place of the buckets that held one of its parameters, or a parameter that is gone.
  std::shared_ptr<Bucket> find_or_add(const std::vector<at::Tensor>& parameters, const std::string& name,
                                      c10::Device device);
  // Forgets all buckets, but keeps their scales, residuals, factors and totals. Waits for the device.
  void save_and_forget();

  // ---- the newest step, as far as it has come ----

  // The buckets that the newest step has sent.
  const std::vector<std::shared_ptr<Bucket>>& newest() const { return newest_; }
  void clear_newest() { newest_.clear(); }
  void add_newest(std::shared_ptr<Bucket> bucket) { newest_.push_back(std::move(bucket)); }
  // Makes all buckets the newest, for an engine whose steps send them all.
  void set_newest_to_all() { newest_ = all_; }

  // The statistics of the newest step, as sums over its buckets: float64 [kNumStats].
  at::Tensor grad_stats() const;

  // ---- what is saved ----

  // Returns the state for a checkpoint: the fp16 scale of each parameter's bucket, its residual, which differs from
  // rank to rank, and its factor. Waits for the device.
  std::vector<SavedState::Row> saved() const;
  void set_saved(const std::vector<SavedState::Row>& rows);
  // A line that the ranks have to agree on.
  const std::string& description() const { return saved_.description(); }

  // Forgets what has to be equal on all ranks, of the buckets of the agreement and of what is saved.
  void forget_equal_state(const Agreement& agreement);

  // ---- the costs of steps ----

  SyncTimes& times() { return times_; }
  SyncTotals totals();

 private:
  void begin_with_saved(Bucket& bucket);
  void forget(const std::function<bool(const Bucket&)>& which);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<Liveness> liveness_;
  std::vector<std::shared_ptr<Bucket>> all_;
  std::vector<std::shared_ptr<Bucket>> newest_;
  SavedState saved_;
  BucketTotals forgotten_totals_;
  SyncTimes times_;
};

}  // namespace fastsync
