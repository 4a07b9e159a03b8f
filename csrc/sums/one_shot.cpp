// The sum in one step: every rank gets what every rank has packed, and adds it while it unpacks.
#include "sums/rank_sum.h"

namespace fastsync {

namespace {

class OneShotSum final : public RankSum {
 public:
  OneShotSum(std::shared_ptr<Team> team, int tag, Bucket bucket, SumBuffers& buffers)
      : RankSum(std::move(team), /*num_parts=*/1, std::move(bucket)), tag_(tag) {
    place(buffers, /*kind=*/team_->size(), [this](Regions& regions) {
      pieces_.clear();
      for_each_piece(/*in_shards=*/false, [&](const Span& span) {
        const Rows row = row_of(span.end - span.begin, bucket_.wire_dtype, span.turn.is_last);
        pieces_.push_back({span, regions.gather(row.length, row.stride), nullptr});
      });
    });
  }

  void send() override {
    for (Piece& piece : pieces_) {
      piece.transfer = team_->all_gather(memory_, piece.rows, tag_);
    }
    for (Piece& piece : pieces_) {
      send_packed(
          *piece.transfer,
          [&] {
            bucket_.pack(bucket_.cut(piece.begin, piece.end, 0), bucket_.wire_dtype,
                         address(piece.rows.begin(team_->rank())), piece.turn, static_cast<uint64_t>(piece.begin));
            if (piece.turn.is_last) {
              put_extras(piece.rows, team_->rank(), 1);
            }
          },
          [&] { fill_with_nan(piece.rows, team_->rank(), 1); });
    }
  }

 private:
  struct Piece : Span {
    Rows rows;  // by rank
    std::unique_ptr<Transfer> transfer;
  };

  void receive(const std::function<void()>& on_reduced) override {
    for (const Piece& piece : pieces_) {
      wait_for_rows(*piece.transfer);
      if (piece.turn.is_last) {
        sum_extras(piece.rows, team_->size());
        on_reduced();
      }
      bucket_.unpack(bucket_.cut(piece.begin, piece.end, 0), address(piece.rows.offset), team_->size(),
                     piece.rows.stride, piece.turn);
    }
    for (const Piece& piece : pieces_) {
      piece.transfer->wait_until_sent();
    }
    release();
  }

  int tag_;
  std::vector<Piece> pieces_;
};

}  // namespace

std::unique_ptr<BucketSum> one_shot_sum(std::shared_ptr<Team> team, int tag, Bucket bucket, SumBuffers& buffers) {
  return std::make_unique<OneShotSum>(std::move(team), tag, std::move(bucket), buffers);
}

}  // namespace fastsync
