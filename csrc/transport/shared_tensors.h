// Tensors that the ranks of each host have once, in memory that they share. Any rank may write to them, so a host's
// ranks take a barrier before and after they do. Hosts do not wait for each other here.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/shard_group.h"
#include "transport/teams.h"

namespace fastsync {

// What SharedTensors throws if ranks cannot share memory, on all of them.
struct NoSharedTensors final : c10::ValueError {
  NoSharedTensors(const std::string& why, std::string reason)
      : c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, why), reason(std::move(reason)) {}

  // Which rank cannot, and why. Empty if none has tried, because no two could, or memory is not what their group uses.
  std::string reason;
};

class SharedTensors final : public ShardGroup {
 public:
  // Makes memory for tensors of so many bytes on each host, of zeros. All ranks of the group call it together. A host's
  // ranks can gather so many numbers of each. Throws NoSharedTensors if they cannot share memory.
  SharedTensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, int64_t num_numbers);

  // Returns the dense tensor that begins with this byte of the memory. It has a storage of its own, so that to save it
  // does not save all of the memory.
  at::Tensor tensor(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) const;

  bool shares_memory() const override { return true; }
  // The ranks of this host.
  const std::vector<int64_t>& ranks() const override { return regions_->ranks(); }

  void begin_all_gather(const std::vector<double>& numbers) override;
  std::vector<std::vector<double>> end_all_gather() override;
  void barrier() override;
  // Tells the other ranks that this rank does not come, so that nobody waits for it until the time-out.
  void give_up() { regions_->give_up(); }

 private:
  double* numbers_of(int64_t rank) const;

  std::shared_ptr<SharedRegions> regions_;
  int64_t num_numbers_;
  int64_t tensors_begin_;  // in bytes
  at::Tensor memory_;
  int64_t num_gathers_ = 0;
  int64_t num_barriers_ = 0;
};

}  // namespace fastsync
