// Ranks of one host whose rows lie in memory that they share. What one has written where it belongs the others read
// there: a row travels by a number that its rank raises.
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

// For the sums of one bucket, one after the other. As one thread sums and another may drive, each phase of a sum has a
// number of its own.
class SharedTeam final : public Team, public std::enable_shared_from_this<SharedTeam> {
 public:
  // The team of this rank's host, with a region of so many bytes for each rank. All ranks of the group call it
  // together. Throws CannotShare.
  static std::shared_ptr<SharedTeam> make(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                          std::shared_ptr<const Host> host, int64_t region_bytes);
  ~SharedTeam() override;

  at::Tensor allocate(int64_t bytes) override;
  void begin(int64_t attempt, int64_t what = -1) override;
  std::shared_ptr<void> use_rows() override;
  void have_read() override { numbers_of(rank())[kRead].raise_to(sum_); }
  void give_up() override { numbers_of(rank())[kGivenUp].raise_to(1); }
  // Another team takes its place.
  void replace() { numbers_of(rank())[kLeft].raise_to(kReplaced); }
  std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag) override;
  std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag) override;

 private:
  static constexpr size_t kPhases = 4;
  static constexpr size_t kRead = kPhases;         // the sums whose rows this rank has read
  static constexpr size_t kGivenUp = kRead + 1;    // 1 where its sums have failed
  static constexpr size_t kLeft = kGivenUp + 1;    // 1 where it has let go of the team, kReplaced for another one
  static constexpr size_t kAnnounced = kLeft + 1;  // what its newest rows are of
  static constexpr int64_t kReplaced = 2;
  using Numbers = std::array<SharedNumber, kAnnounced + 1>;

  class Arrival;

  SharedTeam(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<const Host> host,
             std::shared_ptr<SharedMemory> shared, int64_t region_bytes);
  std::unique_ptr<Transfer> next(int tag, int64_t bytes);
  Numbers& numbers_of(int64_t rank) const;
  void wait_for_all(size_t which, int64_t number);
  void check_others_are_there(size_t which, int64_t number) const;
  void check_announced() const;

  std::shared_ptr<const Host> host_;
  std::shared_ptr<SharedMemory> shared_;
  const pid_t process_id_;
  bool has_cores_;  // for all ranks
  std::array<Waiting, kPhases + 1> waiting_;
  int64_t sum_ = 0;  // the newest, as every rank counts them
  int64_t sum_before_ = 0;
  int64_t announced_ = 0;                      // what the newest is of; 0 where no rank could mistake it
  std::array<int64_t, kPhases> num_pieces_{};  // of the newest
  std::weak_ptr<void> use_;                    // of the rows, by a sum of this rank's
  std::mutex mutex_;                           // guards the next
  std::string failure_;                        // of the first wait that failed
};

}  // namespace fastsync
