// The ranks of one host meet in rounds. In a round each rank may write into memory that all of them share, and read
// what the others have written.
//
// Note [Rounds]
// Each rank has a number, which it raises to r when it comes to round r. By then it has written what it tells in round
// r, and has read all that it wants of round r − 1. So before a rank writes for round r, all ranks must have come to
// round r − 1: they have then read what it wrote for round r − 2, whose place it takes. Each rank has two places, which
// take turns. Before a rank reads what another one has written for round r, that one must have come to round r. A rank
// that only reads waits for nobody before it comes, and one that only writes waits for nobody afterwards.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "transport/host.h"
#include "transport/shared_memory.h"
#include "transport/waiting.h"

namespace fastsync {

inline double seconds_of(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

// What the ranks of a group do together, which has to be the same on all of them.
struct Collective {
  const char* name;    // as in torch.distributed
  int64_t number;      // how many collectives of the group have begun, with this one
  uint64_t agreement;  // a hash of what the ranks must agree on
  std::chrono::milliseconds timeout;
};

// One thread at a time takes part in rounds. Any thread may call abort, fail, and what is const. Ranks count within
// their host; errors have their numbers in the group.
class Rounds {
 public:
  // How many bytes a rank needs at the beginning of its part of the memory.
  static int64_t bytes_of_a_rank(int64_t size);

  // Takes memory of zeros, in which each rank of the host has a part of so many bytes.
  Rounds(std::shared_ptr<const Host> host, std::shared_ptr<SharedMemory> memory, int64_t part_bytes);
  ~Rounds();
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  // How much a rank can write in a round: what stays in a core's cache from one copy to the next, and less if there
  // are many ranks.
  int64_t place_bytes() const { return place_bytes_; }
  const Collective& collective() const { return collective_; }

  // Throws if this rank can do no more, because an earlier collective has failed or was aborted: ranks cannot know in
  // which round the others are. `what` was about to be done.
  void check(const char* what) const;
  // Says which collective the next rounds belong to. Throws if another rank has failed.
  void begin(const Collective& collective, bool beside_caller);
  // Has this rank's waits in the collective last longer, because another rank waits before it comes.
  void wait_longer(std::chrono::milliseconds by) { collective_.timeout += by; }
  // Says why this rank can do no more. The other ranks do not wait for it any more.
  void fail(const std::string& why);

  // Returns this rank's place in the next round, when it may be written to.
  std::byte* writable();
  // Comes to the next round.
  void arrive();
  // Returns what a rank has written for this round, when it is there.
  const std::byte* readable(int64_t rank);
  // Waits until all ranks have come to this round.
  void wait_for_all();

  // Whether this process has the memory: one that its process has forked has not.
  bool is_here() const;
  // Why a rank takes part no more, as in "rank 1's process has ended", and how far it has got; empty if it does. One
  // that has left may have done its part in all that others still do.
  std::string loss_of(int64_t rank) const;
  // Tells how far a rank has got, for errors.
  std::string where_is(int64_t rank) const;

  // Has waits of this rank fail, now and from now on.
  void abort();

 private:
  struct alignas(128) Told;

  Told& told_by(int64_t rank) const;
  std::byte* place_of(int64_t rank) const;
  void wait_for(int64_t rank, int64_t round);
  bool comes_soon(const SharedNumber& theirs, int64_t round) const;
  void look(int64_t round) const;
  std::string late_ranks(int64_t waited_for, int64_t round) const;
  void check_agreement(int64_t rank) const;

  const std::shared_ptr<const Host> host_;
  const std::shared_ptr<SharedMemory> memory_;
  const int64_t part_bytes_;
  const int64_t size_;
  const int64_t rank_;
  const int64_t place_bytes_;
  const bool has_cores_;  // whether there is a core for each rank
  const pid_t process_id_;
  Waiting waiting_;
  int64_t round_ = 0;
  Collective collective_{};
  bool beside_caller_ = false;  // whether the caller computes meanwhile, on the core that a wait would keep busy
  std::atomic<bool> is_aborted_ = false;
  mutable std::mutex mutex_;  // guards the next
  std::string failure_;       // why this rank can do no more
};

}  // namespace fastsync
