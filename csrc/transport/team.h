// The ranks of a level, this one's place among them, and how rows of bytes get from each to the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fastsync {

// Equal rows of a buffer, one for each member of a team, or one for each of the first so many.
struct Rows {
  int64_t offset;     // in bytes, of the first
  int64_t length;     // of what is in a row
  int64_t stride;     // from one to the next, at least the length
  int64_t count = 0;  // for those who go over all rows

  int64_t begin(int64_t row) const { return offset + row * stride; }
  at::Tensor of(const at::Tensor& buffer, int64_t row) const;
};

// Rows on their way. What others send is expected from the beginning, so that it travels without asking.
class Transfer {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  Transfer() = default;
  // Of what is under way already.
  Transfer(Works arrivals, int64_t sent_bytes) : arrivals_(std::move(arrivals)), sent_bytes_(sent_bytes) {}
  virtual ~Transfer() = default;

  // This rank's rows are filled. On a CPU it may be called again after it failed.
  virtual void send() {}

  // Until all rows have come, within the group's time limit. On CUDA the current stream waits.
  virtual void wait_for_rows();

  // On a CPU: whether that would not wait.
  bool have_come() const;

  // Until those sent may be written again.
  void wait_until_sent();

  int64_t sent_bytes() const { return sent_bytes_; }

 protected:
  // Each once, for a second wait would be for another message. One that fails leaves those that come after it.
  static void wait_for(Works& works);

  Works arrivals_;    // of what comes, or of both
  Works departures_;  // of what leaves
  int64_t sent_bytes_ = 0;
};

// Has the process group add up buffers, over all its ranks. Several travel together where the backend can do that, else
// side by side.
std::unique_ptr<Transfer> all_reduce(c10d::ProcessGroup& group, c10::Device device,
                                     const std::vector<at::Tensor>& buffers,
                                     c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM);

// How many bytes are worth a transfer of their own, so that packing, travelling and unpacking of neighbours overlap.
// Large enough that the number of messages costs nothing. NCCL cuts up by itself.
constexpr int64_t kChunkBytes = 1 << 20;

class Team {
 public:
  // Of these ranks of the group, ascending, this one among them.
  Team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::vector<int64_t> ranks);
  virtual ~Team() = default;

  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t rank() const { return rank_; }  // the place among its members

  // Memory for the rows of sums. Each member fills a region of its own, of which it takes so many bytes, zeros at
  // first.
  virtual at::Tensor allocate(int64_t bytes);
  // From one member's region to the next one's, where the members share memory.
  int64_t region_bytes() const { return region_bytes_; }
  // Then rows need not travel, because all members have the buffer.
  bool shares_memory() const { return region_bytes_ > 0; }

  // Before a sum. The attempt, where it is not 0, is the same for those of one step, and more for those of later ones.
  // Where a rank may take a sum for another one, `what` tells which it is, a number that the ranks have agreed on.
  virtual void begin(int64_t /*attempt*/, int64_t /*what*/ = -1) {}
  // Before a sum fills its rows: waits until nobody reads what was in them. What it returns is held as long as the sum.
  virtual std::shared_ptr<void> use_rows() { return nullptr; }
  // This rank has read all that it wants to read.
  virtual void have_read() {}
  // This rank sends no more: who waits for it need not do so until the time-out.
  virtual void give_up() {}

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  c10::Device device() const { return device_; }

  // Whether sending to one rank takes less than a collective of all.
  bool sends_at_once() const { return sends_at_once_; }

  // Row j of `from` goes to member j, and becomes its row rank() of `to`. No row of this rank's own travels: it is to
  // be put where it is wanted, into `to`. Messages of one tag arrive in the order in which they were sent.
  virtual std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag);

  // Row rank() goes to everybody.
  virtual std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag);

 protected:
  std::unique_ptr<Transfer> messages(const at::Tensor& buffer, const Rows& from, const Rows& to, bool same_to_all,
                                     int tag) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::vector<int64_t> ranks_;  // the group's
  int64_t rank_;
  int64_t region_bytes_ = 0;
  bool sends_at_once_;
  bool has_collectives_;  // it is a whole group that brings all rows in one call
};

// Throws c10::ValueError unless the group can sum gradients on the device.
void check_device(c10d::ProcessGroup& group, c10::Device device);

// All ranks of the group. Throws as check_device.
std::shared_ptr<Team> make_team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

}  // namespace fastsync
