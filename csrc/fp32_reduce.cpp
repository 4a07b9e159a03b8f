#include "fp32_reduce.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fastsync {

namespace {

// Of a CPU's messages: large enough that their number costs nothing, small enough to overlap. On CUDA a bucket goes as
// one, for NCCL cuts it up by itself.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kSmallestShardBytes = 1 << 18;
constexpr int64_t kMessageAlignment = 64;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kInt8:
      return 1;
  }
  TORCH_INTERNAL_ASSERT(false);
}

// On a CPU without copy_, which takes longer than packing the gradients of a small policy.
void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  if (from.device().is_cpu()) {
    std::memcpy(to.data_ptr(), from.const_data_ptr(), from.nbytes());
  } else {
    to.copy_(from, /*non_blocking=*/true);
  }
}

std::byte* advance(void* data, int64_t bytes) { return static_cast<std::byte*>(data) + bytes; }

}  // namespace

Fp32Sum::Fp32Sum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, int tag, PackedBucket bucket,
                 Fp32Buffers& buffers)
    : group_(std::move(group)),
      device_(device),
      bucket_(std::move(bucket)),
      world_size_(group_->getSize()),
      rank_(group_->getRank()),
      num_values_(round_up(bucket_.segments.back().offset + bucket_.segments.back().numel,
                           bucket_.wire_dtype == DType::kInt8 ? kBlockValues : 1)),
      limit_(saturation_limit(bucket_.wire_dtype, /*world_size=*/1)) {
  lay_out(tag, buffers);
}

// ---- where everything lies ------------------------------------------------------------------------------------------

int64_t Fp32Sum::bytes_of(int64_t values) const {
  return bucket_.wire_dtype == DType::kInt8 ? values / kBlockValues * static_cast<int64_t>(sizeof(Int8Block))
                                            : values * size_of(bucket_.wire_dtype);
}

int64_t Fp32Sum::values_in(int64_t bytes) const {
  return bucket_.wire_dtype == DType::kInt8 ? bytes / static_cast<int64_t>(sizeof(Int8Block)) * kBlockValues
                                            : bytes / size_of(bucket_.wire_dtype);
}

void Fp32Sum::lay_out(int tag, Fp32Buffers& buffers) {
  const bool is_one_shot = bucket_.algorithm == Algorithm::kOneShot;
  const int64_t num_slots = is_one_shot ? world_size_ : 2 * world_size_;
  const int64_t extra_bytes = bucket_.extras.defined() ? static_cast<int64_t>(bucket_.extras.nbytes()) : 0;
  const int64_t alignment = bucket_.wire_dtype == DType::kInt8 ? sizeof(Int8Block) : kMessageAlignment;
  const int64_t piece_bytes = is_one_shot ? kPieceBytes : std::max(kPieceBytes, world_size_ * kSmallestShardBytes);
  const int64_t piece_values = device_.is_cpu() ? values_in(piece_bytes) / kBlockValues * kBlockValues : num_values_;

  int64_t offset = 0;
  int64_t shard_offset = 0;
  for (int64_t begin = 0; begin < num_values_; begin += piece_values) {
    const int64_t end = std::min(begin + piece_values, num_values_);
    const int64_t shard =
        is_one_shot ? end - begin : round_up((end - begin + world_size_ - 1) / world_size_, kBlockValues);
    const int64_t length = end == num_values_ && extra_bytes > 0
                               ? round_up(bytes_of(shard), bucket_.extras.element_size()) + extra_bytes
                               : bytes_of(shard);
    const int64_t stride = round_up(length, alignment);
    pieces_.push_back({begin, end, shard, offset, length, stride, shard_offset, Exchange(group_, device_, tag),
                       Exchange(group_, device_, tag + 1)});
    offset += num_slots * stride;
    shard_offset += shard;
  }

  // Shards may end beyond the last value. What lies there is added like the rest, so it has to be zeros.
  const std::vector<int64_t> layout{num_values_, static_cast<int64_t>(bucket_.wire_dtype), num_slots, extra_bytes};
  if (buffers.layout != layout) {
    buffers.bytes = at::zeros({offset}, at::TensorOptions().dtype(at::kByte).device(device_));
    buffers.layout = layout;
  }
  bytes_ = buffers.bytes;
}

void* Fp32Sum::address(const Piece& piece, int64_t slot) const {
  return advance(bytes_.data_ptr(), piece.offset + slot * piece.stride);
}

at::Tensor Fp32Sum::message(const Piece& piece, int64_t slot) const {
  return bytes_.narrow(0, piece.offset + slot * piece.stride, piece.length);
}

// As message, of two_shot's second half, in which no extras travel.
at::Tensor Fp32Sum::sums_message(const Piece& piece, int64_t slot) const {
  return bytes_.narrow(0, piece.offset + slot * piece.stride, bytes_of(piece.shard));
}

// At the end of the last piece's messages.
at::Tensor Fp32Sum::extras_in(const Piece& piece, int64_t slot) const {
  const auto num_bytes = static_cast<int64_t>(bucket_.extras.nbytes());
  return message(piece, slot).narrow(0, piece.length - num_bytes, num_bytes);
}

// The segments' parts among the bucket's values [begin, end), of which begin shall lie at the offset.
std::vector<Segment> Fp32Sum::cut(int64_t begin, int64_t end, int64_t offset) const {
  const auto& segments = bucket_.segments;
  std::vector<Segment> parts;
  auto segment = std::upper_bound(segments.begin(), segments.end(), begin,
                                  [](int64_t value, const Segment& other) { return value < other.offset; });
  if (segment != segments.begin()) {
    --segment;
  }
  for (; segment != segments.end() && segment->offset < end; ++segment) {
    const int64_t first = std::max(begin, segment->offset);
    const int64_t numel = std::min(end, segment->offset + segment->numel) - first;
    if (numel <= 0) {
      continue;
    }
    const int64_t skipped = first - segment->offset;
    const int64_t residual_size = bucket_.grad_dtype == DType::kFloat64 ? 8 : 4;
    parts.push_back({advance(segment->data, skipped * size_of(bucket_.grad_dtype)), numel, first - begin + offset,
                     segment->residual ? advance(segment->residual, skipped * residual_size) : nullptr});
  }
  return parts;
}

int64_t Fp32Sum::packing_slot(int64_t rank) const { return rank == rank_ ? world_size_ + rank_ : rank; }

// one_shot: a piece is one message, and slot r is rank r's. two_shot: slot j is for rank j, first its shard as it goes
// there and then the sums that come from there; slot world_size + r is what came from rank r of this rank's own shard,
// where its own part is packed at once.
std::vector<Segment> Fp32Sum::segments_of(const Piece& piece, bool is_packing) const {
  if (bucket_.algorithm == Algorithm::kOneShot) {
    return cut(piece.begin, piece.end, 0);
  }
  std::vector<Segment> all;
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    const int64_t slot = is_packing ? packing_slot(rank) : rank;
    const int64_t begin = piece.begin + rank * piece.shard;
    const auto parts = cut(begin, std::min(begin + piece.shard, piece.end), values_in(slot * piece.stride));
    all.insert(all.end(), parts.begin(), parts.end());
  }
  return all;
}

std::vector<Fp32Sum::Owned> Fp32Sum::owned() const {
  std::vector<Owned> owned;
  for (const Piece& piece : pieces_) {
    const int64_t begin = piece.begin + rank_ * piece.shard;
    const int64_t end = std::min(begin + piece.shard, piece.end);
    for (size_t index = 0; index < bucket_.segments.size(); ++index) {
      const Segment& segment = bucket_.segments[index];
      const int64_t first = std::max(begin, segment.offset);
      const int64_t count = std::min(end, segment.offset + segment.numel) - first;
      if (count > 0) {
        owned.push_back({index, first - segment.offset, count, piece.shard_offset + first - begin});
      }
    }
  }
  return owned;
}

int64_t Fp32Sum::num_owned() const { return pieces_.back().shard_offset + pieces_.back().shard; }

void Fp32Sum::redirect(const at::Tensor& elsewhere) {
  for (Segment& segment : bucket_.segments) {
    segment.data = advance(elsewhere.data_ptr(), segment.offset * size_of(bucket_.grad_dtype));
  }
}

// ---- one sum --------------------------------------------------------------------------------------------------------

void Fp32Sum::send() {
  const bool is_one_shot = bucket_.algorithm == Algorithm::kOneShot;
  for (Piece& piece : pieces_) {
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.first.expect(message(piece, is_one_shot ? peer : world_size_ + peer), peer);
    }
  }
  for (Piece& piece : pieces_) {
    pack(piece);
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.first.send(message(piece, is_one_shot ? rank_ : peer), peer);
    }
    if (device_.is_cpu() || is_one_shot) {
      piece.first.start();
    }
  }
  if (device_.is_cpu() || is_one_shot) {
    return;
  }
  // Beside backward: its stream must not wait for the network.
  const c10::impl::VirtualGuardImpl guard(device_.type());
  c10::Event packed(device_.type());
  packed.record(guard.getStream(device_));
  const c10::StreamGuard beside(guard.getStreamFromGlobalPool(device_));
  packed.block(guard.getStream(device_));
  bytes_.record_stream(guard.getStream(device_));
  for (Piece& piece : pieces_) {
    piece.first.start();
  }
  drive();
}

void Fp32Sum::pack(const Piece& piece) {
  RECORD_FUNCTION("fastsync::pack", {});
  const auto segments = segments_of(piece, /*is_packing=*/true);
  const bool is_one_shot = bucket_.algorithm == Algorithm::kOneShot;
  PackArgs args{segments.data(),
                static_cast<int64_t>(segments.size()),
                bucket_.grad_dtype,
                bucket_.wire_dtype,
                address(piece, is_one_shot ? rank_ : 0),
                /*multiplier=*/1.0,
                limit_,
                data_or_null(bucket_.scale),
                bucket_.stats.data_ptr<double>()};
  args.rounding = bucket_.rounding;
  args.rounding.seed += static_cast<uint64_t>(piece.begin);
  args.turn = {piece.begin == 0, piece.end == num_values_};
  run_pack(args, device_, bucket_.workspace);
  if (args.turn.is_last) {
    add_extras(piece);
  }
}

void Fp32Sum::add_extras(const Piece& piece) {
  if (!bucket_.extras.defined()) {
    return;
  }
  const at::Tensor extras = bucket_.extras.view(at::kByte);
  if (bucket_.algorithm == Algorithm::kOneShot) {
    copy_bytes(extras, extras_in(piece, rank_));
    return;
  }
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    copy_bytes(extras, extras_in(piece, packing_slot(rank)));
  }
}

void Fp32Sum::sum_extras(const Piece& piece) {
  if (!bucket_.extras.defined() || piece.end != num_values_) {
    return;
  }
  const int64_t first = bucket_.algorithm == Algorithm::kOneShot ? 0 : world_size_;
  at::Tensor sums = at::zeros_like(bucket_.extras);
  for (int64_t slot = first; slot < first + world_size_; ++slot) {
    const at::Tensor extras = extras_in(piece, slot).view(at::kFloat);
    if (device_.is_cpu()) {
      auto* into = sums.data_ptr<float>();
      std::transform(into, into + sums.numel(), extras.const_data_ptr<float>(), into, std::plus<>());
    } else {
      sums.add_(extras);
    }
  }
  bucket_.extras = sums;
}

void Fp32Sum::drive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(is_driven_, true) || bucket_.algorithm == Algorithm::kOneShot) {
    return;
  }
  try {
    drive_all();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void Fp32Sum::drive_all() {
  for (Piece& piece : pieces_) {
    piece.first.wait();
    sum_extras(piece);
    reduce(piece);
    for (int64_t step = 1; step < world_size_; ++step) {
      const int64_t peer = (rank_ + step) % world_size_;
      piece.second.expect(sums_message(piece, peer), peer);
    }
    for (int64_t step = 1; step < world_size_; ++step) {
      piece.second.send(sums_message(piece, rank_), (rank_ + step) % world_size_);
    }
    piece.second.start();
  }
}

void Fp32Sum::reduce(const Piece& piece) {
  RECORD_FUNCTION("fastsync::reduce", {});
  ReduceArgs args{address(piece, world_size_),
                  world_size_,
                  piece.stride,
                  piece.shard,
                  bucket_.grad_dtype,
                  bucket_.wire_dtype,
                  address(piece, rank_),
                  bucket_.wire_dtype,
                  1.0 / static_cast<double>(world_size_),
                  limit_,
                  data_or_null(bucket_.scale),
                  nullptr};
  if (residual_.defined()) {
    args.residual = residual_.narrow(0, piece.shard_offset, piece.shard).data_ptr();
  }
  args.rounding = bucket_.rounding;
  args.rounding.seed += static_cast<uint64_t>(piece.begin) + static_cast<uint64_t>(num_values_);
  run_reduce(args, device_);
}

void Fp32Sum::finish() {
  drive();
  if (error_) {
    std::rethrow_exception(error_);
  }
  for (Piece& piece : pieces_) {
    if (bucket_.algorithm == Algorithm::kOneShot) {
      piece.first.wait();
      sum_extras(piece);
    } else {
      piece.second.wait();
    }
    unpack(piece);
  }
}

void Fp32Sum::unpack(const Piece& piece) {
  RECORD_FUNCTION("fastsync::unpack", {});
  const auto segments = segments_of(piece, /*is_packing=*/false);
  UnpackArgs args{segments.data(),
                  static_cast<int64_t>(segments.size()),
                  bucket_.grad_dtype,
                  bucket_.wire_dtype,
                  address(piece, 0),
                  bucket_.scale.defined() ? bucket_.scale.data_ptr<float>() : nullptr,
                  bucket_.stats.data_ptr<double>()};
  if (bucket_.algorithm == Algorithm::kOneShot) {
    args.num_wires = world_size_;
    args.stride_bytes = piece.stride;
    args.multiplier = 1.0 / static_cast<double>(world_size_);
  }
  args.turn = {piece.begin == 0, piece.end == num_values_};
  run_unpack(args, device_, bucket_.workspace);
}

int64_t Fp32Sum::sent_bytes() const {
  int64_t sum = 0;
  for (const Piece& piece : pieces_) {
    sum += piece.first.sent_bytes() + piece.second.sent_bytes();
  }
  return sum;
}

}  // namespace fastsync
