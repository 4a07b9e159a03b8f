// Memory that the ranks of one host share. Each rank has a region in it, and numbers that tell the others how far it
// is: it raises a number, and the others wait for that.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/shared_memory.h"
#include "transport/waiting.h"

namespace fastsync {

class SharedRegions {
 public:
  static constexpr size_t kNumbers = 6;  // how many numbers a rank has

  // Makes a region of so many bytes for each rank of this rank's host. All ranks of the group call it together. Throws
  // CannotShare.
  SharedRegions(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const Host> host, int64_t region_bytes);
  ~SharedRegions();
  SharedRegions(const SharedRegions&) = delete;
  SharedRegions& operator=(const SharedRegions&) = delete;

  const std::vector<int64_t>& ranks() const { return host_->ranks(); }  // as the group numbers them
  int64_t size() const { return static_cast<int64_t>(ranks().size()); }
  int64_t rank() const { return rank_; }  // this rank's index among them
  int64_t region_bytes() const { return region_bytes_; }
  // The group's time-out, or PyTorch's default if a backend that wraps another one does not tell.
  std::chrono::milliseconds timeout() const;
  // All regions, in the order of the ranks.
  at::Tensor memory() const;
  // Has children that this process forks keep the memory. Otherwise they do not have it.
  void keep_in_children() { shared_->keep_in_children(); }

  int64_t number_of(int64_t rank, size_t which) const;
  // Raises a number of this rank. Does nothing if it is as large.
  void raise(size_t which, int64_t number) { numbers_of(rank_)[which].raise_to(number); }
  // Waits until all ranks have raised theirs so far. Throws c10::Error if one does not until the group's time-out, or
  // has failed or left. `what` follows the rank in the first error. After a wait has failed, no other wait begins.
  void wait_for_all(size_t which, int64_t number, const std::string& what);

  // Tells the other ranks that this rank raises no number any more, so that nobody waits for it until the time-out.
  void give_up() { numbers_of(rank_)[kGivenUp].raise_to(1); }
  // Tells the other ranks that this rank lets go of the memory because other memory takes its place.
  void replace() { numbers_of(rank_)[kLeft].raise_to(kReplaced); }

 private:
  // More numbers of a rank, by index.
  static constexpr size_t kGivenUp = kNumbers;   // 1 once it has given up
  static constexpr size_t kLeft = kGivenUp + 1;  // 1 if it has let go of the memory, kReplaced if for other memory
  static constexpr int64_t kReplaced = 2;
  using Numbers = std::array<SharedNumber, kLeft + 1>;

  Numbers& numbers_of(int64_t rank) const { return reinterpret_cast<Numbers*>(shared_->data())[rank]; }
  int64_t control_bytes() const;
  void check_others_are_there(size_t which, int64_t number) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::shared_ptr<const Host> host_;
  const int64_t rank_;
  const int64_t region_bytes_;
  const pid_t process_id_;
  const bool has_cores_;  // whether there is a core for each rank
  std::shared_ptr<SharedMemory> shared_;
  std::array<Waiting, kNumbers> waiting_;
  std::mutex mutex_;     // guards the next
  std::string failure_;  // the error of the first wait that failed
};

}  // namespace fastsync
