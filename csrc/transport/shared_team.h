// The ranks of one host are a team whose rows lie in memory that they share. A rank writes a row where the others read
// it. Then it raises a number, which the others wait for: that is how a row is sent.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/host.h"
#include "transport/team.h"
#include "transport/waiting.h"

namespace fastsync {

// A team serves the sums of one bucket, one after the other. Each phase of a sum has a number of its own, because two
// threads may work on different phases.
class SharedTeam final : public Team, public std::enable_shared_from_this<SharedTeam> {
 public:
  // Makes the team of this rank's host, with a region of so many bytes for each rank. All ranks of the group call it
  // together. `what` the rows have is for errors. Throws CannotShare.
  static std::shared_ptr<SharedTeam> make(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          std::shared_ptr<const Host> host, int64_t region_bytes, std::string what);
  ~SharedTeam() override;

  at::Tensor allocate(int64_t bytes) override;
  void begin(int64_t step_count, int64_t sum_id = -1) override;
  std::shared_ptr<void> use_rows() override;
  void have_read() override { numbers_of(rank())[kRead].raise_to(sum_); }
  void give_up() override { numbers_of(rank())[kGivenUp].raise_to(1); }
  // Tells the other ranks that this rank lets go of the team because another team takes its place.
  void replace() { numbers_of(rank())[kLeft].raise_to(kReplaced); }
  // Has children that this process forks keep the memory. Otherwise they do not have it.
  void keep_in_children() { shared_->keep_in_children(); }

  // A team without sums lets its ranks meet, at one of kPhases places. Each rank comes there, and then may wait until
  // all others have come as often.
  void come_to(size_t place) { numbers_of(rank())[place].raise_to(++num_meetings_[place]); }
  void wait_for_others(size_t place) { wait_for_all(place, num_meetings_[place]); }
  std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag) override;
  std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag) override;

 private:
  static constexpr size_t kPhases = 4;
  // The numbers that a rank raises, by index. The first kPhases tell which rows it has sent.
  static constexpr size_t kRead = kPhases;         // the newest sum whose rows it has read
  static constexpr size_t kGivenUp = kRead + 1;    // 1 if its sums have failed
  static constexpr size_t kLeft = kGivenUp + 1;    // 1 if it has let go of the team, kReplaced if for another team
  static constexpr size_t kAnnounced = kLeft + 1;  // which sum its newest rows belong to
  static constexpr int64_t kReplaced = 2;
  using Numbers = std::array<SharedNumber, kAnnounced + 1>;

  class ChunkTransfer;

  SharedTeam(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<const Host> host,
             std::shared_ptr<SharedMemory> shared, int64_t region_bytes, std::string what);
  // Makes the transfer of the next chunk in the tag's phase. This rank sends so many bytes.
  std::unique_ptr<Transfer> next_chunk(int tag, int64_t bytes);
  Numbers& numbers_of(int64_t rank) const;
  // Waits until all ranks have raised one of their Numbers, the one with the index `which`, to the number.
  void wait_for_all(size_t which, int64_t number);
  void check_others_are_there(size_t which, int64_t number) const;
  void check_announced() const;

  std::shared_ptr<const Host> host_;
  std::shared_ptr<SharedMemory> shared_;
  const std::string what_;
  const pid_t process_id_;
  bool has_cores_;  // whether there is a core for each rank of the team
  std::array<Waiting, kPhases + 1> waiting_;
  int64_t sum_ = 0;         // the number of the newest sum, which is the same on all ranks
  int64_t sum_before_ = 0;  // the number of the sum before it
  int64_t announced_ = 0;   // this rank's kAnnounced in the newest sum; 0 if ranks cannot mistake the sum
  std::array<int64_t, kPhases> num_meetings_{};
  std::array<int64_t, kPhases> num_chunks_{};  // how many transfers of the newest sum each phase has
  std::weak_ptr<void> use_;                    // expires when this rank's newest sum no longer uses the rows
  std::mutex mutex_;                           // guards the next
  std::string failure_;                        // the error of the first wait that failed
};

}  // namespace fastsync
