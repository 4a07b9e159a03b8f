// Ranks that step shards of the parameters meet: they tell each other a few numbers, such as the norms of their shards.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport/team.h"

namespace fastsync {

class Meeting {
 public:
  virtual ~Meeting() = default;

  // Whether the ranks that meet have their shards in memory that they share. If not, each rank of the group has a shard
  // of its own.
  virtual bool shares_memory() const = 0;
  // The ranks that meet, as the group numbers them.
  virtual const std::vector<int64_t>& ranks() const = 0;

  // Each rank tells its numbers, of which it may have fewer than the others, and then hears those of all ranks. `tell`
  // does not wait.
  virtual void tell(const std::vector<double>& numbers) = 0;
  virtual std::vector<std::vector<double>> hear() = 0;
  // Waits until all ranks have come here.
  virtual void meet() {
    tell({});
    hear();
  }
};

// Reads a row in which a rank tells numbers: how many, and then these. Throws c10::Error if the row is too short.
std::vector<double> numbers_in(const double* row, int64_t length);

// All ranks of a group meet by messages. On a device the host waits for it, in `tell` and in `hear`.
class MeetingByMessages final : public Meeting {
 public:
  // A rank tells at most so many numbers. No other messages between the ranks may have the tag.
  MeetingByMessages(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int64_t num_numbers, int tag);

  bool shares_memory() const override { return false; }
  const std::vector<int64_t>& ranks() const override { return ranks_; }
  void tell(const std::vector<double>& numbers) override;
  std::vector<std::vector<double>> hear() override;

 private:
  std::shared_ptr<Team> team_;
  std::vector<int64_t> ranks_;
  int64_t num_numbers_;
  int tag_;
  at::Tensor rows_;  // each rank's: how many numbers it tells, and these
  std::unique_ptr<Transfer> transfer_;
};

}  // namespace fastsync
