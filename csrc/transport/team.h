// A team is some or all ranks of a process group. It gets rows, which are pieces of memory, from each of them to the
// others.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fastsync {

// Describes where rows of one length lie in a buffer: one for each rank of a team, or for each of its first `count`
// ranks. All numbers but the count are in bytes.
struct Rows {
  int64_t offset;     // where the first row begins
  int64_t length;     // how much of a row is used
  int64_t stride;     // from the beginning of a row to that of the next, at least the length
  int64_t count = 0;  // how many rows there are; 0 where nobody goes over all of them

  int64_t begin(int64_t row) const { return offset + row * stride; }
  // The part of the buffer that the row takes.
  at::Tensor of(const at::Tensor& buffer, int64_t row) const;
};

// A transfer sends this rank's rows and receives the other ranks'. On a CPU it begins to receive when it is made, so
// that rows travel as soon as they are sent.
class Transfer {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  Transfer() = default;
  // A transfer that is under way already.
  Transfer(Works arrivals, int64_t sent_bytes) : arrivals_(std::move(arrivals)), sent_bytes_(sent_bytes) {}
  virtual ~Transfer() = default;

  // Sends this rank's rows, which the caller has filled. On a CPU it may be called again after it failed.
  virtual void send() {}

  // Waits until the other ranks' rows have come, within the group's time-out. On CUDA the current stream waits.
  virtual void wait_for_rows();

  // On a CPU: whether wait_for_rows would return at once.
  bool have_come() const;

  // Waits until the rows that were sent may be overwritten.
  void wait_until_sent();

  int64_t sent_bytes() const { return sent_bytes_; }

 protected:
  // Takes works out one by one and waits for each, because a second wait for one would be a wait for another message.
  // If a wait fails, the works that come after it are left.
  static void wait_for(Works& works);

  Works arrivals_;    // the receives, or calls that both send and receive
  Works departures_;  // the sends
  int64_t sent_bytes_ = 0;
};

// A buffer that ranks reduce, and how.
struct Reduced {
  at::Tensor buffer;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
};

// Has the process group reduce buffers over all its ranks. Several buffers are one launch if the backend can do that,
// and else one collective each. With one rank there is nothing to do.
std::unique_ptr<Transfer> all_reduce(c10d::ProcessGroup& group, c10::Device device, const std::vector<Reduced>& all);

// Returns memory to send from and receive into, with any content. It is the backend's own if the backend lends some,
// which it may send without a copy.
at::Tensor new_buffer(c10d::ProcessGroup& group, int64_t bytes, c10::Device device);

// The least size of a chunk on a CPU, in bytes. A chunk travels by itself, so that one chunk is packed while another
// one travels. It is so large that the number of messages costs nothing. On CUDA a bucket is one chunk, because NCCL
// cuts messages up by itself.
constexpr int64_t kChunkBytes = 1 << 20;

class Team {
 public:
  // Takes the team's ranks, as the group numbers them. They ascend, and this rank is among them.
  Team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::vector<int64_t> ranks);
  virtual ~Team() = default;

  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t rank() const { return rank_; }  // this rank's index in the team, not in the group

  // Returns memory for the rows of sums. This rank has a region in it, of which the first so many bytes are zeros.
  virtual at::Tensor allocate(int64_t bytes);
  // The bytes from the beginning of a rank's region to that of the next rank's; 0 if the ranks do not share memory.
  int64_t region_bytes() const { return region_bytes_; }
  // Whether all ranks have one buffer, so that rows need not travel.
  bool shares_memory() const { return region_bytes_ > 0; }

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  c10::Device device() const { return device_; }

  // Whether a message to one rank takes less time than a collective of all ranks.
  bool messages_are_fast() const { return messages_are_fast_; }
  // Whether ReduceOp::AVG multiplies each rank's value by 1/n, rounded to the value's dtype, before it adds. NCCL does.
  bool averages_by_factors() const { return averages_by_factors_; }

  // Makes a transfer in which row j of `from` goes to rank j, and becomes row rank() of `to` there. This rank's row for
  // itself does not travel: the caller puts it into `to`. Messages of one tag arrive in the order in which they were
  // sent.
  virtual std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag);

  // Makes a transfer in which row rank() goes to all ranks.
  virtual std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag);

 protected:
  // Makes such a transfer of one message to each other rank, and of one from each.
  std::unique_ptr<Transfer> messages(const at::Tensor& buffer, const Rows& from, const Rows& to, bool same_to_all,
                                     int tag) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::vector<int64_t> ranks_;  // the team's ranks, as the group numbers them
  int64_t rank_;                // this rank's index among them
  int64_t region_bytes_ = 0;
  bool messages_are_fast_;
  bool averages_by_factors_;
  bool has_collectives_;  // whether the team is a whole group, whose backend moves all rows in one call
};

// Throws c10::ValueError unless the group can sum gradients on the device.
void check_device(c10d::ProcessGroup& group, c10::Device device);

// Makes the team of all ranks of the group. Throws as check_device does.
std::shared_ptr<Team> make_team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

}  // namespace fastsync
