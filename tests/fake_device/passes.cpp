#include "passes.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "device.h"

namespace fake_device {
namespace {

using namespace fastsync;

Passes of_cpu;

int64_t bytes_of(int64_t values, DType dtype) {
  const WireUnit unit = unit_of(dtype);
  return (values + unit.values - 1) / unit.values * unit.bytes;
}

DType compute_dtype(DType grad) { return grad == DType::kFloat64 ? grad : DType::kFloat32; }

class Touches {
 public:
  void reads(const void* data, int64_t bytes) { add(data, bytes, false); }
  void writes(const void* data, int64_t bytes) { add(data, bytes, true); }

  // What of the wire lies opposite a segment.
  void wire(const void* wire, const Segment& segment, DType dtype, bool is_written) {
    add(static_cast<const char*>(wire) + bytes_of(segment.offset, dtype), bytes_of(segment.numel, dtype), is_written);
  }

  void run(const char* name) const { fake_device::run(current_stream(current_device()), name, all_); }

 private:
  // Neighbours count as one.
  void add(const void* data, int64_t bytes, bool is_written) {
    if (data == nullptr) {
      return;
    }
    if (!all_.empty() && all_.back().is_written == is_written &&
        static_cast<const char*>(all_.back().data) + all_.back().bytes == data) {
      all_.back().bytes += bytes;
    } else {
      all_.push_back({data, bytes, is_written});
    }
  }

  std::vector<Touch> all_;
};

// As few as make the tests' models have tables on the device.
constexpr int64_t kFewSegments = 1;
constexpr int64_t kTileSize = 256;

int64_t tile_size(int64_t num_segments, DType /*grad*/, DType /*wire*/) {
  return num_segments > kFewSegments ? kTileSize : 0;
}

int64_t num_uploads = 0;

void upload(const Segment* tiles, int64_t num_tiles, Segment* to, void* /*stream*/) {
  num_uploads += 1;
  Touches touches;
  touches.writes(to, num_tiles * sizeof(Segment));
  touches.run("upload");
  std::copy_n(tiles, num_tiles, to);
}

// Returns the arguments with the tiles that are on the device in place of the segments. The pass reads them.
template <class Args>
Args with_tiles(Args args, const Scratch& scratch, Touches& touches) {
  if (scratch.tiles != nullptr) {
    touches.reads(scratch.tiles, scratch.num_tiles * sizeof(Segment));
    args.segments = scratch.tiles;
    args.num_segments = scratch.num_tiles;
  }
  return args;
}

void pack(const PackArgs& given, const Scratch& scratch, void* /*stream*/) {
  Touches touches;
  const PackArgs args = with_tiles(given, scratch, touches);
  for (int64_t i = 0; i < args.num_segments; ++i) {
    const Segment& segment = args.segments[i];
    touches.reads(segment.data, bytes_of(segment.numel, args.grad_dtype));
  }
  for (int64_t i = 0; i < args.num_segments; ++i) {
    const Segment& segment = args.segments[i];
    touches.wire(args.wire, segment, args.wire_dtype, /*is_written=*/true);
    touches.writes(segment.residuals(), bytes_of(segment.numel, compute_dtype(args.grad_dtype)));
  }
  touches.reads(args.bucket_scale, sizeof(float));
  touches.reads(args.weight, sizeof(double));
  touches.writes(args.stats, kNumStats * sizeof(double));
  touches.writes(scratch.totals, cuda::kTotalsBytes);
  touches.run("pack");
  of_cpu.pack(args, {}, nullptr);
}

void unpack(const UnpackArgs& given, const Scratch& scratch, void* /*stream*/) {
  Touches touches;
  const UnpackArgs args = with_tiles(given, scratch, touches);
  for (int64_t wire = 0; wire < args.num_wires; ++wire) {
    for (int64_t i = 0; i < args.num_segments; ++i) {
      touches.wire(static_cast<const char*>(args.wire) + wire * args.stride_bytes, args.segments[i], args.wire_dtype,
                   /*is_written=*/false);
    }
  }
  for (int64_t i = 0; i < args.num_segments; ++i) {
    touches.reads(args.segments[i].factor(), sizeof(double));
    touches.writes(args.segments[i].data, bytes_of(args.segments[i].numel, args.grad_dtype));
  }
  touches.writes(args.bucket_scale, sizeof(float));
  touches.writes(args.stats, kNumStats * sizeof(double));
  touches.writes(scratch.totals, cuda::kTotalsBytes);
  touches.run("unpack");
  of_cpu.unpack(args, {}, nullptr);
}

void reduce(const ReduceArgs& args, const Scratch& /*scratch*/, void* /*stream*/) {
  Touches touches;
  for (int64_t wire = 0; wire < args.num_wires; ++wire) {
    touches.reads(static_cast<const char*>(args.wire) + wire * args.stride_bytes,
                  bytes_of(args.numel, args.wire_dtype));
  }
  touches.writes(args.out, bytes_of(args.numel, args.out_dtype));
  touches.reads(args.bucket_scale, sizeof(float));
  touches.writes(args.residual, bytes_of(args.numel, compute_dtype(args.grad_dtype)));
  touches.run("reduce");
  of_cpu.reduce(args, {}, nullptr);
}

}  // namespace

int64_t take_uploads() { return std::exchange(num_uploads, 0); }

const Passes& passes_over(const Passes& cpu) {
  static const Passes passes{&pack, &unpack, &reduce, &tile_size, &upload};
  of_cpu = cpu;
  return passes;
}

}  // namespace fake_device
