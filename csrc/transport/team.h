// A team is the ranks of a level, and knows how rows of bytes get from each of them to the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace fastsync {

// Equal rows of a buffer, one for each rank of a team, or one for each of the first so many. All but the count are
// bytes.
struct Rows {
  int64_t offset;     // where the first row begins
  int64_t length;     // how much of a row is used
  int64_t stride;     // from the beginning of a row to that of the next, at least the length
  int64_t count = 0;  // how many rows there are, for those who go over all

  int64_t begin(int64_t row) const { return offset + row * stride; }
  at::Tensor of(const at::Tensor& buffer, int64_t row) const;
};

// Rows on their way. A transfer expects the other ranks' rows from its beginning, so that they travel at once.
class Transfer {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  Transfer() = default;
  // A transfer that is under way already.
  Transfer(Works arrivals, int64_t sent_bytes) : arrivals_(std::move(arrivals)), sent_bytes_(sent_bytes) {}
  virtual ~Transfer() = default;

  // Sends this rank's rows, which have been filled. On a CPU it may be called again after it failed.
  virtual void send() {}

  // Waits until all rows have come, within the group's time-out. On CUDA the current stream waits.
  virtual void wait_for_rows();

  // On a CPU: whether wait_for_rows would return at once.
  bool have_come() const;

  // Waits until the rows that were sent may be overwritten.
  void wait_until_sent();

  int64_t sent_bytes() const { return sent_bytes_; }

 protected:
  // Takes works out one by one and waits for each. A second wait for one would be a wait for another message. If a wait
  // fails, the works that come after it are left.
  static void wait_for(Works& works);

  Works arrivals_;    // the receives, or calls that both send and receive
  Works departures_;  // the sends
  int64_t sent_bytes_ = 0;
};

// Has the process group add up buffers over all its ranks. Several buffers travel together if the backend can do that,
// and else side by side.
std::unique_ptr<Transfer> all_reduce(c10d::ProcessGroup& group, c10::Device device,
                                     const std::vector<at::Tensor>& buffers,
                                     c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM);

// How many bytes make a chunk, which travels by itself, so that one chunk is packed while another one travels. It is so
// large that the number of messages costs nothing. NCCL cuts up by itself.
constexpr int64_t kChunkBytes = 1 << 20;

class Team {
 public:
  // These ranks of the group, ascending, with this rank among them.
  Team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, std::vector<int64_t> ranks);
  virtual ~Team() = default;

  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t rank() const { return rank_; }  // in the team, and not in the group

  // Memory for the rows of sums. Each rank fills a region of its own, of which it uses so many bytes, zeros at first.
  virtual at::Tensor allocate(int64_t bytes);
  // From the beginning of a rank's region to that of the next rank's, if the ranks share memory.
  int64_t region_bytes() const { return region_bytes_; }
  // Whether all ranks have one buffer, so that rows need not travel.
  bool shares_memory() const { return region_bytes_ > 0; }

  // A sum begins. An attempt other than 0 is the same number for all sums of a step, and greater in later steps. If a
  // rank may take one sum for another, `what` tells them apart: a number that the ranks have agreed on.
  virtual void begin(int64_t /*attempt*/, int64_t /*what*/ = -1) {}
  // A sum is about to fill its rows: waits until nobody reads what was in them. The sum holds the result for as long as
  // it uses the rows.
  virtual std::shared_ptr<void> use_rows() { return nullptr; }
  // This rank has read all rows that it needs.
  virtual void have_read() {}
  // This rank sends no more, so that nobody needs to wait for it until the time-out.
  virtual void give_up() {}

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  c10::Device device() const { return device_; }

  // Whether a message to one rank takes less time than a collective of all ranks.
  bool sends_at_once() const { return sends_at_once_; }

  // Row j of `from` goes to rank j, and becomes row rank() of `to` there. This rank's row for itself does not travel:
  // the caller puts it into `to`. Messages of one tag arrive in the order in which they were sent.
  virtual std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag);

  // Row rank() goes to all ranks.
  virtual std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag);

 protected:
  std::unique_ptr<Transfer> messages(const at::Tensor& buffer, const Rows& from, const Rows& to, bool same_to_all,
                                     int tag) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::vector<int64_t> ranks_;  // of the team, in the group
  int64_t rank_;
  int64_t region_bytes_ = 0;
  bool sends_at_once_;
  bool has_collectives_;  // the team is a whole group, whose backend moves all rows in one call
};

// Throws c10::ValueError unless the group can sum gradients on the device.
void check_device(c10d::ProcessGroup& group, c10::Device device);

// The team of all ranks of the group. Throws as check_device does.
std::shared_ptr<Team> make_team(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device);

}  // namespace fastsync
