#include "sums/rank_sum.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace fastsync {

namespace {

constexpr int64_t kSmallestShardBytes = 1 << 18;
// Of gradients. A message wakes who waits for it, and where cores are busy that takes longer than what pieces win.
constexpr int64_t kOnePieceBytes = 1 << 22;

// What parts are multiples of, in values. On int8 so many blocks that rows begin at multiples of 16 bytes.
constexpr int64_t part_multiple(DType dtype) { return dtype == DType::kInt8 ? 4 * kBlockValues : kBlockValues; }
static_assert(4 * sizeof(Int8Block) % 16 == 0);

// Blocks are counted from region to region.
constexpr int64_t kRegionAlignment = std::lcm(kRowAlignment, 4 * static_cast<int64_t>(sizeof(Int8Block)));

// Flags, then riders, in float32.
at::Tensor joined(const Extras& extras) {
  if (!extras.flags.defined() || !extras.riders.defined()) {
    return extras.flags.defined() ? extras.flags : extras.riders;
  }
  return at::cat({extras.flags, extras.riders});
}

}  // namespace

RankSum::RankSum(std::shared_ptr<Team> team, int64_t num_parts, Bucket bucket)
    : BucketSum(std::move(bucket)), team_(std::move(team)), num_parts_(num_parts), extras_(joined(bucket_.extras)) {}

// ---- where everything lies ------------------------------------------------------------------------------------------

int64_t RankSum::values_of_piece(bool in_shards) const {
  const bool is_small = !team_->shares_memory() && bytes_of(bucket_.num_values, bucket_.grad_dtype) <= kOnePieceBytes;
  const int64_t least = is_small ? kOnePieceBytes : (in_shards ? num_parts_ * kSmallestShardBytes : 0);
  return values_in(std::max(team_->piece_bytes(), least), bucket_.wire_dtype) / kBlockValues * kBlockValues;
}

void RankSum::for_each_piece(bool in_shards, const std::function<void(const Span&)>& call) const {
  const int64_t values = values_of_piece(in_shards);
  for (int64_t begin = 0; begin < bucket_.num_values; begin += values) {
    const int64_t end = std::min(begin + values, bucket_.num_values);
    call({begin, end, {begin == 0, end == bucket_.num_values}});
  }
}

int64_t RankSum::part_of(const Span& span) const {
  return round_up((span.end - span.begin + num_parts_ - 1) / num_parts_, part_multiple(bucket_.wire_dtype));
}

Rows RankSum::row_of(int64_t values, DType dtype, bool is_last) const {
  const int64_t bytes = bytes_of(values, dtype);
  const int64_t length = is_last && extras_.defined() ? round_up(bytes, sizeof(float)) + extra_bytes() : bytes;
  const int64_t alignment = dtype == DType::kInt8 ? bytes_of(part_multiple(dtype), dtype) : kRowAlignment;
  return {0, length, round_up(length, alignment)};
}

int64_t RankSum::region_for(const std::function<void(Regions&)>& lay_out) const {
  Regions unsized(*team_, 0);
  lay_out(unsized);
  const int64_t region = round_up(unsized.used(), kRegionAlignment);
  Regions regions(*team_, region);
  lay_out(regions);
  return region;
}

// What lies beyond the last value, and on an int8 wire between gradients, is added like the rest, so it has to be
// zeros.
void RankSum::place(SumBuffers& buffers, int64_t kind, const std::function<void(Regions&)>& lay_out) {
  const int64_t region = region_for(lay_out);
  use_ = team_->use_rows();
  const std::vector<int64_t> layout{bucket_.num_values, static_cast<int64_t>(bucket_.wire_dtype), extra_bytes(), kind};
  if (buffers.layout != layout) {
    buffers = {team_->allocate(region), layout};
  }
  memory_ = buffers.memory;
}

void RankSum::place_unset(SumBuffers& buffers, const std::function<void(Regions&)>& lay_out) {
  const int64_t region = region_for(lay_out);
  use_ = team_->use_rows();
  const bool is_shared = team_->shares_memory();
  const int64_t bytes = (is_shared ? team_->size() : 1) * region;
  if (!buffers.memory.defined() || buffers.memory.numel() < bytes) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(bucket_.device);
    buffers = {is_shared ? team_->allocate(region) : at::empty({region}, options), {}};
  }
  memory_ = buffers.memory;
}

// At full width, with every gradient in blocks of its own, and each part of each piece rounded up.
int64_t RankSum::most_bytes(const Bucket& bucket, int64_t num_parts) {
  const int64_t width = size_of(bucket.grad_dtype);
  int64_t bytes = 0;
  for (const at::Tensor& grad : bucket.grads) {
    bytes += round_up(grad.numel(), kBlockValues) * width;
  }
  const int64_t most_pieces = bytes / (kPieceBytes / 2) + 1;
  const int64_t most_rounding =
      part_multiple(DType::kInt8) * width + bytes_of(part_multiple(DType::kInt8), DType::kInt8) + 4 * kRowAlignment;
  int64_t extra_bytes = 0;
  for (const at::Tensor& extra : {bucket.extras.flags, bucket.extras.riders}) {
    extra_bytes += extra.defined() ? static_cast<int64_t>(extra.nbytes()) : 0;
  }
  return bytes + num_parts * (most_pieces * most_rounding + round_up(extra_bytes, kRowAlignment)) + kRegionAlignment;
}

std::vector<Segment> RankSum::parts(const Span& span, int64_t part, DType dtype, int64_t base,
                                    const std::function<int64_t(int64_t)>& place_of) const {
  std::vector<Segment> all;
  for (int64_t member = 0; span.begin + member * part < span.end; ++member) {
    const int64_t first = span.begin + member * part;
    const auto cut = bucket_.cut(first, std::min(first + part, span.end), values_in(place_of(member) - base, dtype));
    all.insert(all.end(), cut.begin(), cut.end());
  }
  return all;
}

// ---- what is done ---------------------------------------------------------------------------------------------------

// Others expect every piece, and tell messages apart by their order alone. So where one cannot be packed or sent, it
// goes as nan, and so do those after it. In memory that ranks share nobody takes one sum for another, so there it is
// sent again.
void RankSum::send_packed(Transfer& transfer, c10::function_ref<void()> pack, c10::function_ref<void()> spoil) {
  try {
    failed_to_send() ? spoil() : pack();
    transfer.send();
  } catch (...) {
    if (failed_to_send() || team_->shares_memory() || !bucket_.device.is_cpu()) {
      throw;
    }
    failure_to_send_ = std::current_exception();
    spoil();
    transfer.send();
  }
}

// All bits are set in nan of any dtype, also as the scale of an int8 block.
void RankSum::fill_with_nan(const Rows& rows, int64_t first, int64_t count) const {
  std::memset(address(rows.begin(first)), 0xFF, count * rows.stride);
}

void RankSum::fill_with_nan(const ReduceScatter& scatter) const {
  fill_with_nan(scatter.to, 0, scatter.num_parts);
  if (scatter.team->rank() < scatter.num_parts) {
    fill_with_nan(scatter.from, scatter.team->rank(), 1);
  }
}

void RankSum::pack_parts(const ReduceScatter& scatter, const Span& span, int64_t part, DType dtype,
                         uint64_t seed) const {
  const auto place_of = [&](int64_t member) { return scatter.place_of(member); };
  const int64_t base = scatter.to.offset;
  bucket_.pack(parts(span, part, dtype, base, place_of), dtype, address(base), span.turn, seed);
  if (span.turn.is_last) {
    put_extras(scatter);
  }
}

void RankSum::reduce(const Rows& rows, int64_t num_rows, int64_t values, int64_t out, int64_t place, uint64_t seed,
                     std::optional<double> share) const {
  RECORD_FUNCTION("fastsync::reduce", {});
  ReduceArgs args =
      bucket_.mean(address(rows.offset), bucket_.wire_dtype, num_rows, rows.stride, values, address(out), seed, share);
  if (bucket_.residual_of_sums.defined()) {
    args.residual = bucket_.residual_of_sums.narrow(0, place, values).data_ptr();
  }
  run_reduce(args, bucket_.device);
}

void RankSum::put_extras(const Rows& rows, int64_t first, int64_t count) const {
  if (extras_.defined()) {
    put_values(extras_, memory_, rows.begin(first) + rows.length - extra_bytes(), rows.stride, count);
  }
}

void RankSum::put_extras(const ReduceScatter& scatter) const {
  put_extras(scatter.to, 0, scatter.num_parts);  // to this rank's own row for nothing
  if (scatter.team->rank() < scatter.num_parts) {
    put_extras(scatter.from, scatter.team->rank(), 1);
  }
}

void RankSum::sum_extras(const Rows& rows, int64_t count) {
  if (!extras_.defined()) {
    return;
  }
  const at::Tensor sums = at::empty_like(extras_);
  run_reduce({address(rows.offset + rows.length - extra_bytes()), count, rows.stride, sums.numel(), DType::kFloat32,
              DType::kFloat32, sums.data_ptr(), DType::kFloat32, /*multiplier=*/1.0,
              /*limit=*/std::numeric_limits<double>::infinity(), /*bucket_scale=*/nullptr, /*residual=*/nullptr},
             bucket_.device);
  extras_ = sums;
  const int64_t num_flags = bucket_.extras.flags.defined() ? bucket_.extras.flags.numel() : 0;
  sums_of_extras_ = {sums.narrow(0, 0, num_flags), sums.narrow(0, num_flags, sums.numel() - num_flags)};
}

void RankSum::wait_for_rows(Transfer& transfer) {
  transfer.wait_for_rows();
  sent_bytes_ += transfer.sent_bytes();
}

// Made on backward's stream or beside it.
void RankSum::use_memory() const {
  use_on_current_stream(memory_);
  use_on_current_stream(extras_);
}

}  // namespace fastsync
