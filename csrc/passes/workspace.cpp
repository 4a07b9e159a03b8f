#include "passes/workspace.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "passes/cuda/tile_table.h"
#include "passes/cuda_graphs.h"

namespace fastsync {

namespace {

// A step has a table for packing and one for unpacking, and with mean_of_used one for the factors of its means.
// Gradients that take turns between two places in memory need twice as many.
constexpr size_t kMaxTables = 6;

bool is_same(const Segment& one, const Segment& other) {
  return one.data == other.data && one.numel == other.numel && one.offset == other.offset &&
         one.operand == other.operand;
}

}  // namespace

Workspace::Workspace(c10::Device device) : device_(device) {
  if (!device.is_cpu()) {
    totals_ = at::zeros({cuda::kTotalsBytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
}

Scratch Workspace::prepare(const Passes& passes, c10::ArrayRef<Segment> segments, DType grad, DType wire,
                           bool have_factors, void* stream) {
  Scratch scratch{totals_.defined() ? totals_.data_ptr() : nullptr};
  const int64_t tile_size =
      passes.tile_size != nullptr ? passes.tile_size(static_cast<int64_t>(segments.size()), grad, wire) : 0;
  if (tile_size == 0) {
    return scratch;
  }
  Table* table = find(segments, tile_size, grad, have_factors);
  if (table->segments.empty()) {
    const auto tiles = cuda::cut_into_tiles(segments.data(), segments.size(), tile_size, grad, have_factors);
    table->num_tiles = static_cast<int64_t>(tiles.size());
    table->tiles = at::empty({static_cast<int64_t>(sizeof(Segment)) * table->num_tiles},
                             at::TensorOptions().dtype(at::kByte).device(device_));
    passes.upload(tiles.data(), table->num_tiles, static_cast<Segment*>(table->tiles.data_ptr()), stream);
    table->segments = segments.vec();
  }
  scratch.tiles = static_cast<const Segment*>(table->tiles.data_ptr());
  scratch.num_tiles = table->num_tiles;
  return scratch;
}

// A graph repeats the kernel that writes its table, in the graph's own memory. So whatever runs between two replays,
// the graph and the steps beside it find their own tables.
Workspace::Table* Workspace::find(c10::ArrayRef<Segment> segments, int64_t tile_size, DType grad, bool have_factors) {
  if (is_capturing(device_)) {
    captured_ = Table();
    return &captured_;
  }
  const c10::StreamId stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).id();
  const auto found = std::find_if(tables_.begin(), tables_.end(), [&](const Table& table) {
    return table.tile_size == tile_size && table.grad == grad && table.have_factors == have_factors &&
           table.stream == stream &&
           std::equal(table.segments.begin(), table.segments.end(), segments.begin(), segments.end(), &is_same);
  });
  if (found != tables_.end()) {
    std::rotate(found, found + 1, tables_.end());
    return &tables_.back();
  }
  if (tables_.size() == kMaxTables) {
    tables_.erase(tables_.begin());
  }
  return &tables_.emplace_back(
      Table{.segments = {}, .tile_size = tile_size, .grad = grad, .have_factors = have_factors, .stream = stream});
}

}  // namespace fastsync
