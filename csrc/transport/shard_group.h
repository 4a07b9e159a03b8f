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

class ShardGroupByMessages;

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
    begin_all_gather(std::vector<double>());
    end_all_gather();
  }

  // The group itself if it is one of a device, where numbers may stay; null on a CPU.
  virtual ShardGroupByMessages* on_device() { return nullptr; }
};

// Reads a row of a rank's numbers: how many, and then these. Throws c10::Error if the row is too short.
std::vector<double> numbers_in(const double* row, int64_t length);
// Reads a row of each rank, float64 [ranks, length] on the host.
std::vector<std::vector<double>> numbers_in(const at::Tensor& rows);

// All ranks of a process group, by messages. On a device the host waits for numbers that it reads, and no other ones.
class ShardGroupByMessages final : public ShardGroup {
 public:
  // A rank gives at most so many numbers. No other messages between the ranks may have the tag.
  ShardGroupByMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int64_t num_numbers, int tag);

  c10::Device device() const { return team_->device(); }
  ShardGroupByMessages* on_device() override { return device().is_cpu() ? nullptr : this; }

  // Begins to gather numbers that are on the device: float64, of one dimension.
  void begin_all_gather(const at::Tensor& numbers);
  // Returns each rank's row on the device: how many numbers it gives, these, and then any others. The current stream
  // waits.
  at::Tensor end_on_device();

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
