// The buckets of an engine: those that it has, what is saved of those that it had, and what their steps have cost.
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

class Buckets {
 public:
  Buckets(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<Liveness> liveness)
      : group_(std::move(group)), liveness_(std::move(liveness)) {}

  const std::vector<std::shared_ptr<Bucket>>& all() const { return all_; }

  // Adds a bucket of parameters, which starts with what is saved of them. The name is for errors.
  std::shared_ptr<Bucket> add(std::vector<ParameterId> parameters, std::shared_ptr<Agreement> agreement,
                              const std::string& name, c10::Device device);
  // Finds the bucket of exactly these parameters. A new one has an agreement of its own, and takes the place of the
  // buckets that held one of them, or a parameter that is gone.
  std::shared_ptr<Bucket> find_or_add(const std::vector<at::Tensor>& parameters, const std::string& name,
                                      c10::Device device);
  // Forgets all. Their scales, residuals and totals are kept. Waits for the device.
  void save_and_forget();

  // ---- the newest step, as far as it has come ----

  const std::vector<std::shared_ptr<Bucket>>& newest() const { return newest_; }
  void clear_newest() { newest_.clear(); }
  void add_newest(std::shared_ptr<Bucket> bucket) { newest_.push_back(std::move(bucket)); }
  // Each step sends all.
  void set_newest_to_all() { newest_ = all_; }

  // float64 [kNumStats]: the sums over its buckets.
  at::Tensor grad_stats() const;

  // ---- what is saved ----

  // For checkpoints: the fp16 scale of each parameter's bucket, and what error feedback has not sent yet, of which
  // every rank has another. Waits for the device.
  std::vector<SavedState::Row> saved() const;
  void set_saved(const std::vector<SavedState::Row>& rows);
  // A line that the ranks have to agree on.
  const std::string& description() const { return saved_.description(); }

  // ---- what steps have cost ----

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
