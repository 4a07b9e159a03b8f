// The ranks that step shards of the parameters, and the collectives that they have beside their sums: they gather a few
// numbers, such as the norms of their shards.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/team.h"

namespace fastsync {

class ShardGroup {
 public:
  virtual ~ShardGroup() = default;

  // Whether the ranks have their shards in memory that they share. If not, each rank of the process group has a shard
  // of its own.
  virtual bool shares_memory() const = 0;
  // The ranks, as the process group numbers them.
  virtual const std::vector<int64_t>& ranks() const = 0;

  // Begins to gather the numbers of all ranks, which need not have as many. Does not wait.
  virtual void begin_all_gather(const std::vector<double>& numbers) = 0;
  // Waits for the numbers of all ranks, and returns them.
  virtual std::vector<std::vector<double>> end_all_gather() = 0;
  virtual void barrier() {
    begin_all_gather({});
    end_all_gather();
  }
};

// Reads a row of a rank's numbers: how many, and then these. Throws c10::Error if the row is too short.
std::vector<double> numbers_in(const double* row, int64_t length);

// All ranks of a process group, by messages. On a device the host waits, when a gather begins and when it ends.
class ShardGroupByMessages final : public ShardGroup {
 public:
  // A rank gives at most so many numbers. No other messages between the ranks may have the tag.
  ShardGroupByMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int64_t num_numbers, int tag);

  bool shares_memory() const override { return false; }
  const std::vector<int64_t>& ranks() const override { return ranks_; }
  void begin_all_gather(const std::vector<double>& numbers) override;
  std::vector<std::vector<double>> end_all_gather() override;

 private:
  std::shared_ptr<Team> team_;
  std::vector<int64_t> ranks_;
  int64_t num_numbers_;
  int tag_;
  at::Tensor rows_;  // each rank's: how many numbers it gives, and these
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace fastsync
