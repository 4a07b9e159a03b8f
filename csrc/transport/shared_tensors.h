// Tensors that the ranks of each host have once, in memory that they share. Any rank may write to them, so a host's
// ranks meet before and after they do. Hosts do not meet each other here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "transport/teams.h"

namespace fastsync {

class SharedTensors {
 public:
  // Makes memory for tensors of so many bytes on each host, of zeros. All ranks of the group call it together. A host's
  // ranks can tell each other so many numbers at once. Throws c10::ValueError if ranks cannot share memory.
  SharedTensors(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t bytes, int64_t num_numbers);

  // Returns the dense tensor that begins with this byte of the memory. It has a storage of its own, so that to save it
  // does not save all of the memory.
  at::Tensor tensor(int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) const;

  // The ranks of this host, as the group numbers them.
  const std::vector<int64_t>& ranks() const { return ranks_; }

  // Each rank tells its numbers, of which it may have fewer than the others, and then hears those of all ranks. `tell`
  // does not wait.
  void tell(const std::vector<double>& numbers);
  std::vector<std::vector<double>> hear();
  // Waits until all ranks have come here.
  void meet();
  // Tells the other ranks that this rank does not come, so that nobody waits for it until the time-out.
  void give_up() { team_->give_up(); }

 private:
  double* numbers_of(int64_t rank) const;

  std::shared_ptr<SharedTeam> team_;
  std::vector<int64_t> ranks_;
  int64_t num_numbers_;
  int64_t tensors_begin_;  // in bytes
  at::Tensor memory_;
  int64_t num_told_ = 0;
};

}  // namespace fastsync
