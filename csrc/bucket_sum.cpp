#include "bucket_sum.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace fastsync {

namespace {

// Of a CPU's messages: large enough that their number costs nothing, small enough to overlap. On CUDA a bucket goes as
// one, for NCCL cuts it up by itself.
constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kSmallestShardBytes = 1 << 18;

}  // namespace

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

int64_t bytes_of(int64_t values, DType dtype) {
  return dtype == DType::kInt8 ? values / kBlockValues * static_cast<int64_t>(sizeof(Int8Block))
                               : values * size_of(dtype);
}

int64_t values_in(int64_t bytes, DType dtype) {
  return dtype == DType::kInt8 ? bytes / static_cast<int64_t>(sizeof(Int8Block)) * kBlockValues
                               : bytes / size_of(dtype);
}

BucketSum::BucketSum(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, PackedBucket bucket)
    : group_(std::move(group)),
      device_(device),
      bucket_(std::move(bucket)),
      world_size_(group_->getSize()),
      rank_(group_->getRank()),
      num_values_(wire_length(bucket_.segments, bucket_.alignment)),
      limit_(saturation_limit(bucket_.wire_dtype, /*world_size=*/1)) {}

// ---- where everything lies ------------------------------------------------------------------------------------------

int64_t BucketSum::values_per_piece(bool in_shards) const {
  const int64_t bytes = in_shards ? std::max(kPieceBytes, world_size_ * kSmallestShardBytes) : kPieceBytes;
  return device_.is_cpu() ? values_in(bytes, bucket_.wire_dtype) / kBlockValues * kBlockValues : num_values_;
}

void BucketSum::take(Fp32Buffers& buffers, int64_t num_bytes, std::vector<int64_t> layout) {
  if (buffers.layout != layout) {
    buffers.bytes = at::zeros({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device_));
    buffers.layout = std::move(layout);
  }
  bytes_ = buffers.bytes;
}

template <class Call>
void BucketSum::for_each_part(int64_t begin, int64_t end, const Call& call) const {
  const auto& segments = bucket_.segments;
  auto segment = std::upper_bound(segments.begin(), segments.end(), begin,
                                  [](int64_t value, const Segment& other) { return value < other.offset; });
  if (segment != segments.begin()) {
    --segment;
  }
  for (; segment != segments.end() && segment->offset < end; ++segment) {
    const int64_t first = std::max(begin, segment->offset);
    const int64_t numel = std::min(end, segment->offset + segment->numel) - first;
    if (numel > 0) {
      call(*segment, first - segment->offset, numel);
    }
  }
}

std::vector<Segment> BucketSum::cut(int64_t begin, int64_t end, int64_t offset) const {
  const int64_t grad_size = size_of(bucket_.grad_dtype);
  const int64_t residual_size = bucket_.grad_dtype == DType::kFloat64 ? 8 : 4;
  std::vector<Segment> parts;
  for_each_part(begin, end, [&](const Segment& segment, int64_t skipped, int64_t numel) {
    parts.push_back({advance(segment.data, skipped * grad_size), numel, segment.offset + skipped - begin + offset,
                     segment.residual ? advance(segment.residual, skipped * residual_size) : nullptr});
  });
  return parts;
}

void BucketSum::own(std::vector<Owned>& owned, int64_t begin, int64_t end, int64_t place) const {
  for_each_part(begin, end, [&](const Segment& segment, int64_t skipped, int64_t numel) {
    const auto index = static_cast<size_t>(&segment - bucket_.segments.data());
    owned.push_back({index, skipped, numel, place + segment.offset + skipped - begin});
  });
}

void BucketSum::redirect(const at::Tensor& elsewhere) {
  for (Segment& segment : bucket_.segments) {
    segment.data = advance(elsewhere.data_ptr(), segment.offset * size_of(bucket_.grad_dtype));
  }
}

// ---- passes ---------------------------------------------------------------------------------------------------------

void BucketSum::pack(const std::vector<Segment>& segments, DType dtype, void* wire, Turn turn, uint64_t seed) {
  PackArgs args{segments.data(),
                static_cast<int64_t>(segments.size()),
                bucket_.grad_dtype,
                dtype,
                wire,
                /*multiplier=*/1.0,
                limit_,
                data_or_null(bucket_.scale),
                bucket_.stats.data_ptr<double>()};
  args.rounding = rounding(seed);
  args.turn = turn;
  args.alignment = dtype == bucket_.wire_dtype ? bucket_.alignment : 1;  // the offsets are for the wire alone
  run_pack(args, device_, bucket_.workspace);
}

void BucketSum::unpack(const std::vector<Segment>& segments, const void* wire, int64_t num_wires, int64_t stride,
                       Turn turn) {
  RECORD_FUNCTION("fastsync::unpack", {});
  run_unpack(
      {segments.data(), static_cast<int64_t>(segments.size()), bucket_.grad_dtype, bucket_.wire_dtype, wire,
       data_or_null(bucket_.scale), bucket_.stats.data_ptr<double>(), num_wires, stride,
       1.0 / static_cast<double>(num_wires), turn, bucket_.step.defined() ? bucket_.step.data_ptr<int64_t>() : nullptr},
      device_, bucket_.workspace);
}

ReduceArgs BucketSum::mean(const void* wire, DType dtype, int64_t num_wires, int64_t stride, int64_t numel, void* out,
                           DType out_dtype, uint64_t seed) const {
  return {wire,
          num_wires,
          stride,
          numel,
          bucket_.grad_dtype,
          dtype,
          out,
          out_dtype,
          1.0 / static_cast<double>(num_wires),
          limit_,
          data_or_null(bucket_.scale),
          /*residual=*/nullptr,
          rounding(seed)};
}

// The bucket's, for one of the calls that encode a part of it.
Rounding BucketSum::rounding(uint64_t seed) const {
  Rounding own = bucket_.rounding;
  own.seed += seed;
  return own;
}

// ---- extras ---------------------------------------------------------------------------------------------------------

// On a CPU without copy_, which takes longer than packing the gradients of a small policy.
void BucketSum::put_extras(int64_t end, int64_t stride, int64_t count) {
  if (!bucket_.extras.defined()) {
    return;
  }
  const int64_t begin = end - extra_bytes();
  if (!device_.is_cpu()) {
    bytes_.as_strided({count, extra_bytes()}, {stride, 1}, begin).copy_(bucket_.extras.view(at::kByte));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(address(begin + i * stride), bucket_.extras.const_data_ptr(), bucket_.extras.nbytes());
  }
}

void BucketSum::sum_extras(int64_t end, int64_t stride, int64_t count) {
  if (!bucket_.extras.defined()) {
    return;
  }
  const at::Tensor sums = at::empty_like(bucket_.extras);
  run_reduce({address(end - extra_bytes()), count, stride, sums.numel(), DType::kFloat32, DType::kFloat32,
              sums.data_ptr(), DType::kFloat32, /*multiplier=*/1.0, /*limit=*/std::numeric_limits<double>::infinity(),
              /*bucket_scale=*/nullptr, /*residual=*/nullptr},
             device_);
  bucket_.extras = sums;
}

// ---- one sum --------------------------------------------------------------------------------------------------------

void BucketSum::beside_backward(const std::function<void()>& call) {
  call_beside(device_, [&] {
    const auto stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    bytes_.record_stream(stream);
    call();
    done_beside_.emplace(device_.type()).record(stream);
  });
}

void BucketSum::drive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(is_driven_, true)) {
    return;
  }
  try {
    drive_all();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void BucketSum::finish(Stopwatch& stopwatch) {
  drive();
  if (error_) {
    std::rethrow_exception(error_);
  }
  if (done_beside_) {  // no message says so where a rank has nobody to send to
    done_beside_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  receive(stopwatch);
  if (device_.is_cpu()) {
    return;
  }
  // Made on backward's stream or beside it, and read on this one.
  const auto stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  bytes_.record_stream(stream);
  if (bucket_.extras.defined()) {
    bucket_.extras.record_stream(stream);
  }
}

}  // namespace fastsync
