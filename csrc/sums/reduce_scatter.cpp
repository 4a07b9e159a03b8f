// The first half of two_shot by itself: rank j gets everybody's shard j, adds it up, and is done.
#include "sums/rank_sum.h"

namespace fastsync {

namespace {

class ReduceScatterSum final : public RankSum {
 public:
  ReduceScatterSum(const std::shared_ptr<Team>& team, int tag, Bucket bucket, at::Tensor output, double factor,
                   SumBuffers& buffers)
      : RankSum(team, /*num_parts=*/team->size(), std::move(bucket)), output_(std::move(output)), factor_(factor) {
    place_unset(buffers, [&](Regions& regions) {
      pieces_.clear();
      const int64_t values = round_up(values_of_piece(/*in_shards=*/true) / team->size(), kBlockValues);
      for (int64_t begin = 0; begin < shard(); begin += values) {
        const int64_t end = std::min(begin + values, shard());
        const Rows row = row_of(round_up(end - begin, kBlockValues), bucket_.wire_dtype, /*is_last=*/false);
        const Exchange rows = regions.exchange(team->size(), row.length, row.stride);
        pieces_.push_back(
            {{begin, end, {begin == 0, end == shard()}}, {team, team->size(), tag, rows.to, rows.from, nullptr}});
      }
    });
  }

  void send() override {
    for (Piece& piece : pieces_) {
      piece.scatter.expect(memory_);
    }
    for (Piece& piece : pieces_) {
      const int64_t base = piece.scatter.to.offset;
      send_packed(
          *piece.scatter.transfer,
          [&] {
            bucket_.pack(rows_of(piece), bucket_.wire_dtype, address(base), piece.turn,
                         static_cast<uint64_t>(piece.begin * team_->size()));
          },
          [&] { fill_with_nan(piece.scatter); });
    }
  }

 private:
  struct Piece : Span {  // of each shard
    ReduceScatter scatter;
  };

  int64_t shard() const { return output_.numel(); }

  std::vector<Segment> rows_of(const Piece& piece) const {
    std::vector<Segment> rows;
    for (int64_t member = 0; member < team_->size(); ++member) {
      const int64_t place = piece.scatter.place_of(member) - piece.scatter.to.offset;
      const auto cut = bucket_.cut(member * shard() + piece.begin, member * shard() + piece.end,
                                   values_in(place, bucket_.wire_dtype));
      rows.insert(rows.end(), cut.begin(), cut.end());
    }
    return rows;
  }

  void receive(const std::function<void()>& on_reduced) override {
    for (const Piece& piece : pieces_) {
      wait_for_rows(*piece.scatter.transfer);
      if (piece.turn.is_last) {
        on_reduced();
      }
      const Rows& from = piece.scatter.from;
      void* const part = advance(output_.data_ptr(), piece.begin * size_of(bucket_.grad_dtype));
      bucket_.unpack({{part, piece.end - piece.begin, /*offset=*/0}}, address(from.offset), team_->size(), from.stride,
                     piece.turn, factor_);
    }
    for (const Piece& piece : pieces_) {
      piece.scatter.transfer->wait_until_sent();
    }
    release();
  }

  at::Tensor output_;
  double factor_;
  std::vector<Piece> pieces_;
};

}  // namespace

std::unique_ptr<BucketSum> reduce_scatter_sum(std::shared_ptr<Team> team, int tag, Bucket bucket, at::Tensor output,
                                              double factor, SumBuffers& buffers) {
  return std::make_unique<ReduceScatterSum>(team, tag, std::move(bucket), std::move(output), factor, buffers);
}

}  // namespace fastsync
