// The sum of gradients that lie in memory which all ranks share: each rank takes the mean of a part of them where they
// are, and writes it to everybody's.
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "sums/rank_sum.h"

namespace fastsync {

namespace {

// Of each thread: what has been written to this rank's row goes to the others while the cache still has it.
constexpr int64_t kValuesAtOnce = 1 << 16;

class InPlaceSum final : public RankSum {
 public:
  InPlaceSum(const std::shared_ptr<Team>& team, int tag, Bucket bucket, int64_t region, BucketViews& views)
      : RankSum(team, /*num_parts=*/team->size(), std::move(bucket)), tag_(tag) {
    region = region / kRowAlignment * kRowAlignment;
    Regions regions(*team, region);
    const Rows row = row_of(bucket_.num_values, bucket_.wire_dtype, /*is_last=*/true);
    values_ = regions.gather(row.length, row.stride);
    tallies_ = regions.gather(sizeof(Tally), sizeof(Tally));
    TORCH_INTERNAL_ASSERT(regions.used() <= region);
    if (!views.memory.defined()) {
      views.memory = team->allocate(region);
    }
    use(views.memory);
    if (views.gradients.empty()) {
      views.gradients = views_of_segments();
    }
    views_ = &views.gradients;
  }

  void send() override {
    ready_ = team_->all_gather(memory_, values_, tag_);
    averaged_ = team_->all_gather(memory_, tallies_, tag_ + 1);
    std::vector<Segment> elsewhere;
    for (size_t i = 0; i < bucket_.segments.size(); ++i) {
      const Segment& segment = bucket_.segments[i];
      if (segment.data != (*views_)[i].const_data_ptr()) {
        elsewhere.push_back(segment);
      } else if (segment.residual != nullptr) {  // of error feedback that has ended
        (*views_)[i].add_(bucket_.residuals[i]);
      }
    }
    bucket_.pack(elsewhere, bucket_.wire_dtype, address(values_.begin(team_->rank())), {}, /*seed=*/0);
    put_extras(values_, team_->rank(), 1);
    ready_->send();
  }

  bool needs_driving() const override { return true; }
  const std::vector<at::Tensor>* views() const override { return views_; }

 private:
  using Tally = std::array<double, kNumStats>;

  Tally& tally_of(int64_t rank) const { return *reinterpret_cast<Tally*>(address(tallies_.begin(rank))); }

  std::vector<at::Tensor> views_of_segments() const {
    std::vector<at::Tensor> views;
    for (const Segment& segment : bucket_.segments) {
      void* const data = address(values_.begin(team_->rank()) + bytes_of(segment.offset, bucket_.wire_dtype));
      views.push_back(
          at::from_blob(data, {segment.numel}, [memory = memory_](void*) {}, scalar_type_of(bucket_.wire_dtype)));
    }
    return views;
  }

  void drive_all() override {
    wait_for_rows(*ready_);
    const int64_t part = part_of({0, bucket_.num_values, {}});
    const int64_t begin = std::min(team_->rank() * part, bucket_.num_values);
    const int64_t end = std::min(begin + part, bucket_.num_values);
    const int64_t at_once = kValuesAtOnce * at::get_num_threads();
    int64_t first = begin;
    do {  // once where there is nothing to average, for the statistics
      const int64_t last = std::min(first + at_once, end);
      average(first, last, {first == begin, last == end});
      first = last;
    } while (first < end);
    const double* const stats = bucket_.stats.const_data_ptr<double>();
    std::copy_n(stats, kNumStats, tally_of(team_->rank()).begin());
    averaged_->send();
  }

  void average(int64_t first, int64_t last, Turn turn) const {
    const int64_t width = size_of(bucket_.wire_dtype);
    const int64_t rank = team_->rank();
    const auto values_of = [&](int64_t of) { return address(values_.begin(of) + first * width); };
    bucket_.unpack({{values_of(rank), last - first, first}}, address(values_.offset), team_->size(), values_.stride,
                   turn);
    for (int64_t step = 1; step < team_->size(); ++step) {
      std::memcpy(values_of((rank + step) % team_->size()), values_of(rank), (last - first) * width);
    }
  }

  void receive(const std::function<void()>& on_reduced) override {
    wait_for_rows(*averaged_);
    sum_extras(values_, team_->size());
    on_reduced();
    double* const stats = bucket_.stats.data_ptr<double>();
    std::fill_n(stats, kNumStats, 0.0);
    for (int64_t rank = 0; rank < team_->size(); ++rank) {
      const Tally& tally = tally_of(rank);
      stats[kSumOfSquares] += tally[kSumOfSquares];
      stats[kNumNonfinite] += tally[kNumNonfinite];
      stats[kNumSaturated] += tally[kNumSaturated];
      stats[kMaxMagnitude] = std::max(stats[kMaxMagnitude], tally[kMaxMagnitude]);
    }
    release();
  }

  int tag_;
  Rows values_;   // of the bucket, by rank: gradients, then extras
  Rows tallies_;  // by the rank that averages: the statistics of its part
  const std::vector<at::Tensor>* views_;
  std::unique_ptr<Transfer> ready_;
  std::unique_ptr<Transfer> averaged_;
};

}  // namespace

std::unique_ptr<BucketSum> in_place_sum(const std::shared_ptr<Team>& team, int tag, Bucket bucket, int64_t region,
                                        BucketViews& views) {
  return std::make_unique<InPlaceSum>(team, tag, std::move(bucket), region, views);
}

}  // namespace fastsync
