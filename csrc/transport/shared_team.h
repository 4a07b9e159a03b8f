// The ranks of one host are a team whose rows lie in memory that they share. A rank writes a row where the others read
// it. Then it raises a number, which the others wait for: that is how a row is sent.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/shared_regions.h"
#include "transport/team.h"

namespace fastsync {

// Tells a team in shared memory which sum it is.
struct SumNumber {
  // How many half steps have begun. A sum that failed and is tried again in its step has the same count, so the ranks
  // take it for the same sum. With 0 each is a new sum.
  int64_t step_count = 0;
  // A number that the ranks have agreed on. It tells sums apart if a rank may take one for another, and is below 0 if
  // no rank can.
  int64_t id = -1;
};

// A team serves the sums of one bucket, one after the other. Each phase of a sum has a number of its own, because two
// threads may work on different phases.
class SharedTeam final : public Team, public std::enable_shared_from_this<SharedTeam> {
 public:
  // `what` the rows have is for errors.
  SharedTeam(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<SharedRegions> regions,
             std::string what);

  const std::shared_ptr<SharedRegions>& regions() const { return regions_; }

  at::Tensor allocate(int64_t bytes) override;
  // Begins a sum: waits until nobody reads the rows of the sum before. The sum holds the result for as long as it uses
  // the rows.
  std::shared_ptr<void> begin(const SumNumber& number);
  // Tells the other ranks that this rank has read all rows that it needs.
  void have_read() { regions_->raise(kRead, sum_); }
  std::unique_ptr<Transfer> all_to_all(const at::Tensor& buffer, const Rows& from, const Rows& to, int tag) override;
  std::unique_ptr<Transfer> all_gather(const at::Tensor& buffer, const Rows& rows, int tag) override;

 private:
  // The numbers that a rank raises, by index. The first kPhases tell which rows it has sent.
  static constexpr size_t kPhases = 4;
  static constexpr size_t kRead = kPhases;         // the newest sum whose rows it has read
  static constexpr size_t kAnnounced = kRead + 1;  // which sum its newest rows belong to
  static_assert(kAnnounced < SharedRegions::kNumbers);

  class ChunkTransfer;

  // Makes the transfer of the next chunk in the tag's phase. This rank sends so many bytes.
  std::unique_ptr<Transfer> next_chunk(int tag, int64_t bytes);
  void check_announced() const;

  const std::shared_ptr<SharedRegions> regions_;
  const std::string what_;
  const std::string sent_;  // these follow a rank that others wait for, in errors
  const std::string read_;
  int64_t sum_ = 0;         // the number of the newest sum, which is the same on all ranks
  int64_t sum_before_ = 0;  // the number of the sum before it
  int64_t announced_ = 0;   // this rank's kAnnounced in the newest sum; 0 if ranks cannot mistake the sum
  std::array<int64_t, kPhases> num_chunks_{};  // how many transfers of the newest sum each phase has
  std::weak_ptr<void> use_;                    // expires when this rank's newest sum no longer uses the rows
};

}  // namespace fastsync
