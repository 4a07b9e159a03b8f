// The sum in two steps, over ranks whose links are alike: rank j gets everybody's shard j and adds it, and hands the
// mean, encoded anew, to everybody.
#include "sums/rank_sum.h"

namespace fastsync {

namespace {

class TwoShotSum final : public RankSum {
 public:
  TwoShotSum(const std::shared_ptr<Team>& team, int tag, Bucket bucket, SumBuffers& buffers)
      : RankSum(team, /*num_parts=*/team->size(), std::move(bucket)), tag_(tag) {
    place(buffers, /*kind=*/2 * team->size(), [&](Regions& regions) {
      pieces_.clear();
      int64_t place = 0;
      for_each_piece(/*in_shards=*/true, [&](const Span& span) {
        const int64_t shard = part_of(span);
        const Rows row = row_of(shard, bucket_.wire_dtype, span.turn.is_last);
        auto [to, from, means] = regions.exchange(team->size(), row.length, row.stride);
        means.length = bytes_of(shard, bucket_.wire_dtype);  // no extras travel with them
        pieces_.push_back({span, shard, place, {team, team->size(), tag, to, from, nullptr}, means, nullptr});
        place += shard;
      });
    });
  }

  Owned owned() const override {
    Owned owned{{}, pieces_.back().place + pieces_.back().shard};
    for (const Piece& piece : pieces_) {
      const int64_t begin = piece.begin + team_->rank() * piece.shard;
      bucket_.own(owned, begin, std::min(begin + piece.shard, piece.end), piece.place);
    }
    return owned;
  }

  void send() override {
    for (Piece& piece : pieces_) {
      piece.scatter.expect(memory_);
    }
    for (Piece& piece : pieces_) {
      send_packed(
          *piece.scatter.transfer,
          [&] {
            pack_parts(piece.scatter, piece, piece.shard, bucket_.wire_dtype, static_cast<uint64_t>(piece.begin));
          },
          [&] { fill_with_nan(piece.scatter); });
    }
  }

  bool needs_driving() const override { return true; }

 private:
  struct Piece : Span {
    int64_t shard;  // values that each rank adds up
    int64_t place;  // in values, in the residual
    ReduceScatter scatter;
    Rows means;  // by the rank that adds: where its shard went from
    std::unique_ptr<Transfer> gather;
  };

  void drive_all() override {
    for (Piece& piece : pieces_) {
      wait_for_rows(*piece.scatter.transfer);
      piece.scatter.transfer->wait_until_sent();  // for means take the place of what is sent
      if (piece.turn.is_last) {
        sum_extras(piece.scatter.from, team_->size());
      }
      reduce(piece.scatter.from, team_->size(), piece.shard, piece.means.begin(team_->rank()), piece.place,
             static_cast<uint64_t>(piece.begin) + static_cast<uint64_t>(bucket_.num_values));
      piece.gather = team_->all_gather(memory_, piece.means, tag_ + 1);
      piece.gather->send();
    }
  }

  void receive(const std::function<void()>& on_reduced) override {
    for (const Piece& piece : pieces_) {
      wait_for_rows(*piece.gather);
      if (piece.turn.is_last) {
        on_reduced();
      }
      const auto place_of = [&](int64_t member) { return piece.means.begin(member); };
      bucket_.unpack(parts(piece, piece.shard, bucket_.wire_dtype, piece.means.offset, place_of),
                     address(piece.means.offset), /*num_wires=*/1, /*stride=*/0, piece.turn);
    }
    for (const Piece& piece : pieces_) {
      piece.gather->wait_until_sent();
    }
    release();
  }

  int tag_;
  std::vector<Piece> pieces_;
};

}  // namespace

std::unique_ptr<BucketSum> two_shot_sum(std::shared_ptr<Team> team, int tag, Bucket bucket, SumBuffers& buffers) {
  return std::make_unique<TwoShotSum>(team, tag, std::move(bucket), buffers);
}

}  // namespace fastsync
