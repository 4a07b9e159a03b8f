// What sums have in common that the ranks take themselves, in float32 (float64 for float64 gradients) and rank order,
// whatever travels: one rounding on the way in and at most one for each sum that travels on, however many ranks there
// are. A bucket goes in pieces: while one travels the next is packed, and the one before is added or unpacked.
#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <vector>

#include "sums/bucket_sum.h"
#include "transport/regions.h"

namespace fastsync {

constexpr int64_t kRowAlignment = 64;  // in bytes

// The first half of two_shot: each of a team's first members gets everybody's part of a piece that it is to add up, as
// rows of `from` in rank order. Other members' parts are packed into rows of `to`, its own where it is added.
struct ReduceScatter {
  int64_t place_of(int64_t member) const { return (member == team->rank() ? from : to).begin(member); }
  void expect(const at::Tensor& buffer) { transfer = team->all_to_all(buffer, to, from, tag); }

  std::shared_ptr<Team> team;
  int64_t num_parts;
  int tag;
  Rows to;
  Rows from;
  std::unique_ptr<Transfer> transfer;
};

class RankSum : public BucketSum {
 public:
  // As many bytes of one rank's values as no sum of such a bucket needs more of, whatever it travels as.
  static int64_t most_bytes(const Bucket& bucket, int64_t num_parts);

 protected:
  // A piece of the bucket's values [begin, end), which is the first to pass, the last, both or neither.
  struct Span {
    int64_t begin;
    int64_t end;
    Turn turn;
  };

  // Those who add up a part of a piece each are num_parts.
  RankSum(std::shared_ptr<Team> team, int64_t num_parts, Bucket bucket);

  // ---- where everything lies ----

  // How many values a piece has, but the last; in_shards: pieces of which each rank adds up a part.
  int64_t values_of_piece(bool in_shards) const;
  // call(span) for each piece.
  void for_each_piece(bool in_shards, const std::function<void(const Span&)>& call) const;
  // How many values of a piece are each part.
  int64_t part_of(const Span& span) const;
  // A row of so many values, with room for extras behind those of the bucket's last piece.
  Rows row_of(int64_t values, DType dtype, bool is_last) const;
  // Takes memory for what lay_out(regions) places, of zeros where it was last used with another layout; this sum's
  // until release, when all is read. Called twice, for only then it is known how large a region is.
  void place(SumBuffers& buffers, int64_t kind, const std::function<void(Regions&)>& lay_out);
  // The same for a sum that reads nothing that nobody has written: buffers may be those of several buckets in turn.
  void place_unset(SumBuffers& buffers, const std::function<void(Regions&)>& lay_out);
  void release() {
    team_->have_read();
    use_.reset();
  }
  void* address(int64_t offset) const { return advance(memory_.data_ptr(), offset); }
  // A piece's parts, so many values each, where place_of(member) says in bytes where each lies, on a wire from base on.
  std::vector<Segment> parts(const Span& span, int64_t part, DType dtype, int64_t base,
                             const std::function<int64_t(int64_t)>& place_of) const;

  // ---- what is done ----

  // Packs a piece, and has it sent. What fails is noted, and spoils it and those after it: see check_sent.
  void send_packed(Transfer& transfer, c10::function_ref<void()> pack, c10::function_ref<void()> spoil);
  void fill_with_nan(const Rows& rows, int64_t first, int64_t count) const;
  void fill_with_nan(const ReduceScatter& scatter) const;
  // Packs everybody's part of the piece, with the extras if it is the last one.
  void pack_parts(const ReduceScatter& scatter, const Span& span, int64_t part, DType dtype, uint64_t seed) const;
  // The mean of rows of the wire, so many values, to an offset; its loss is kept from this place on. share: as in
  // Bucket::mean.
  void reduce(const Rows& rows, int64_t num_rows, int64_t values, int64_t out, int64_t place, uint64_t seed,
              std::optional<double> share = {}) const;
  // Extras lie at the end of rows.
  void put_extras(const ReduceScatter& scatter) const;
  void put_extras(const Rows& rows, int64_t first, int64_t count) const;
  void sum_extras(const Rows& rows, int64_t count);
  // Those of a CPU that sends may be written again once it has been waited for itself: who waits for that last, when it
  // has long happened, need not sleep for it.
  void wait_for_rows(Transfer& transfer);
  void use_memory() const override;
  void give_up() override { team_->give_up(); }

  std::shared_ptr<Team> team_;
  at::Tensor memory_;

 private:
  int64_t region_for(const std::function<void(Regions&)>& lay_out) const;

  int64_t num_parts_;
  std::shared_ptr<void> use_;  // of the memory

  int64_t extra_bytes() const { return extras_.defined() ? static_cast<int64_t>(extras_.nbytes()) : 0; }

  at::Tensor extras_;  // flags, then riders; undefined where there are none
};

}  // namespace fastsync
