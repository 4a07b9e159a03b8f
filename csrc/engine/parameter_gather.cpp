#include "engine/parameter_gather.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "passes/backend.h"
#include "passes/graph_memory.h"
#include "transport/progress_thread.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

constexpr int64_t kAlignment = 64;  // of rows and of their pieces, in bytes

}  // namespace

// ---- a gather under way ---------------------------------------------------------------------------------------------

at::Tensor GatherWork::row(const Piece& piece, int64_t rank) const {
  return buffer_.narrow(0, rows_.begin(rank) + piece.begin, piece.end - piece.begin);
}

// Values that travel as they are have the same place in the output as in the row.
at::Tensor GatherWork::shard(const Piece& piece, int64_t rank) const {
  return output_.narrow(0, rank * rows_.length + piece.begin, piece.end - piece.begin);
}

Range GatherWork::values_of(const Piece& piece) const {
  const DType wire = shards_.front().wire_dtype;
  return {values_in(piece.begin, wire), values_in(piece.end, wire), /*offset=*/0};
}

// Ranks of one host share the rows. Otherwise values that travel as they are go from one rank's output to the others',
// if the rows are aligned there. All others have a buffer.
void GatherWork::lay_out_rows() {
  constexpr int64_t kPage = 4096;
  Teams& teams = memory_->teams;
  const int64_t size = teams.all()->size();
  const int64_t length =
      is_encoded() ? bytes_of(shards_.front().num_values, shards_.front().wire_dtype) : output_.numel() / size;
  if (teams.hosts().num_nodes == 1 && !teams.has_room(length)) {
    memory_->buffer.reset();
    teams.make_room(round_up(length, kPage));
  }
  const bool is_shared = teams.shared() != nullptr;
  team_ = is_shared ? std::shared_ptr<Team>(teams.shared()) : teams.all();
  if (!is_shared && !is_encoded() && length % kAlignment == 0) {
    buffer_ = output_;
    rows_ = {0, length, length, size};
    return;
  }
  const int64_t stride = is_shared ? team_->region_bytes() : round_up(length, kAlignment);
  rows_ = {0, length, stride, size};
  at::Tensor& kept = memory_->buffer;
  if (!kept.defined() || kept.numel() < size * stride) {
    const c10::InferenceMode for_any_mode(false);
    kept = is_shared ? team_->allocate(stride) : new_buffer(*team_->group(), size * stride, team_->device());
  }
  buffer_ = kept;
  if (!team_->device().is_cpu()) {
    kept.reset();  // the device's allocator keeps memory, in the order of streams
  }
}

void GatherWork::send(int first_tag, int64_t module) {
  lay_out_rows();
  // In shared memory the team itself tells modules apart.
  const int tag = team_->shares_memory() ? 0 : first_tag + static_cast<int>(module);
  team_->begin(/*step_count=*/0, module);
  use_ = team_->use_rows();
  const int64_t unit = std::lcm(kAlignment, is_encoded() ? unit_of(shards_.front().wire_dtype).bytes : 1);
  const int64_t length = team_->device().is_cpu() && is_copied() ? kChunkBytes / unit * unit : rows_.length;
  for (int64_t begin = 0; begin < rows_.length; begin += length) {
    const int64_t end = std::min(begin + length, rows_.length);
    const Rows rows{rows_.offset + begin, end - begin, rows_.stride, rows_.count};
    pieces_.push_back({begin, end, team_->all_gather(buffer_, rows, tag)});
  }
  for (const Piece& piece : pieces_) {
    pack(piece);
    piece.transfer->send();
  }
  stopwatch_->mark(Mark::kSent);
}

void GatherWork::pack(const Piece& piece) const {
  const int64_t rank = team_->rank();
  if (is_encoded()) {
    shards_[rank].pack({values_of(piece)}, shards_[rank].wire_dtype, row(piece, rank).data_ptr(), Position());
  } else if (is_copied()) {
    row(piece, rank).copy_(shard(piece, rank));
  }
}

void GatherWork::wait() {
  if (!memory_) {
    return;
  }
  const WithoutPythonObjects without_python;
  engine_->liveness().note_gathering(step_);
  const auto in_any_case = c10::make_scope_exit([this] { let_go(); });
  engine_->wait_for_ranks("gathering " + module_->name, [this] { receive(); });
  engine_->liveness().note_rest();
}

void GatherWork::receive() {
  use_on_current_stream(buffer_);
  for (const Piece& piece : pieces_) {
    piece.transfer->wait_for_rows();
    if (piece.end == rows_.length) {
      stopwatch_->mark(Mark::kReduced);
    }
    unpack(piece);
  }
  for (const Piece& piece : pieces_) {
    piece.transfer->wait_until_sent();
    module_->totals->wire_bytes += piece.transfer->sent_bytes();
  }
  team_->have_read();
  is_received_ = true;
  stopwatch_->mark(Mark::kDone);
}

void GatherWork::unpack(const Piece& piece) const {
  for (int64_t rank = 0; rank < team_->size(); ++rank) {
    if (is_encoded()) {
      shards_[rank].unpack({values_of(piece)}, row(piece, rank).data_ptr(), /*num_wires=*/1, /*stride=*/0,
                           /*factor=*/1.0, Position());
    } else if (is_copied() && rank != team_->rank()) {
      shard(piece, rank).copy_(row(piece, rank));
    }
  }
}

// Messages that nobody has waited for may still arrive, and keep the buffer that they arrive in.
void GatherWork::let_go() {
  if (!memory_) {
    return;
  }
  pieces_.clear();
  use_.reset();
  if (!is_received_ && !memory_->teams.shared()) {
    memory_->buffer.reset();
  }
  memory_->is_in_use.store(false, std::memory_order_release);
  memory_.reset();
}

// ---- the engine -----------------------------------------------------------------------------------------------------

ParameterGather::ParameterGather(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<std::string> names,
                                 const std::string& what)
    : EngineState(std::move(group), what), agreement_(*group_, what) {
  for (std::string& name : names) {
    modules_.push_back({std::move(name)});
  }
}

std::shared_ptr<GatherWork> ParameterGather::all_gather(size_t index, const at::Tensor& output,
                                                        const std::vector<int64_t>& numels) {
  check_not_forked("shard the model in the process that trains");
  const WithoutPythonObjects without_python;
  const std::lock_guard<std::mutex> lock(mutex_);
  GatheredModule& module = modules_.at(index);
  auto work = std::make_shared<GatherWork>();
  if (output.numel() == 0) {
    return work;
  }
  begin_step();
  work->step_ = take_number();
  if (!have_agreed(agreement_, compressions_)) {
    agree(agreement_, "agreement on the all-gathers", compressions_, work->step_, /*lines=*/"", output.device());
  }
  pass_agreement(agreement_, work->step_);

  const at::ScalarType dtype = output.scalar_type();
  const std::optional<DType> wire = compressions_->at(output.numel()).wire;
  TORCH_CHECK_VALUE(!wire || is_supported(dtype), "compression: ", module.name, " has parameters of ", dtype,
                    dtype == at::kByte ? ", or of several dtypes" : "", ", and only float32, float64, float16 and ",
                    "bfloat16 travel in fewer bits; call fully_shard for the others, and register_fsdp with ",
                    "parameters='none' for them");
  const bool is_encoded = wire && *wire != dtype_of(dtype);
  if (is_encoded) {
    work->shards_ = encoded(module, output, numels, *wire);
  }
  work->engine_ = shared_from_this();
  work->module_ = &module;
  work->output_ = output.view(at::kByte);
  work->memory_ = free_memory(output.device());
  work->stopwatch_ = buckets_.times().start_bucket(module.totals, output.device());
  work->stopwatch_->mark(Mark::kStart);
  liveness_->note_gathering(work->step_);
  wait_for_ranks("gathering " + module.name,
                 [&] { work->send(first_tag(agreement_.number), static_cast<int64_t>(index)); });
  note_costs(*module.totals, output, work->memory_->teams);
  return work;
}

// The segments of one rank's shard lie in the output as far behind those of another's as its shard does.
std::vector<FlatGradients> ParameterGather::encoded(GatheredModule& module, const at::Tensor& output,
                                                    const std::vector<int64_t>& numels, DType wire) const {
  if (!module.workspace) {
    module.workspace = std::make_shared<Workspace>(output.device());
    module.stats = at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(output.device()));
  }
  if (is_capturing(output.device())) {  // asked first, because the list costs more
    hold_for_graph(output.device(), {module.stats, module.workspace->totals()});
  }
  const int64_t size = group_->getSize();
  const int64_t shard = output.numel() / size;
  FlatGradients first(output.narrow(0, 0, shard).split_with_sizes(numels), wire, output.device());
  first.stats = module.stats;
  first.workspace = module.workspace;
  std::vector<FlatGradients> shards(size, first);
  for (int64_t rank = 0; rank < size; ++rank) {
    for (Segment& segment : shards[rank].segments) {
      segment.data = advance(segment.data, rank * shard * output.element_size());
    }
  }
  return shards;
}

// At least two take turns, so that a rank fills one while others still read the one before.
std::shared_ptr<GatherMemory> ParameterGather::free_memory(c10::Device device) {
  for (size_t i = 1; i <= memories_.size() && memories_.size() >= 2; ++i) {
    const size_t index = (newest_memory_ + i) % memories_.size();
    if (!memories_[index]->is_in_use.load(std::memory_order_acquire)) {
      newest_memory_ = index;
      memories_[index]->is_in_use = true;
      return memories_[index];
    }
  }
  newest_memory_ = memories_.size();
  return memories_.emplace_back(std::make_shared<GatherMemory>(group_, device));
}

void ParameterGather::note_costs(BucketTotals& totals, const at::Tensor& output, const Teams& teams) {
  totals.numel = output.numel();
  totals.num_syncs += 1;
  totals.kernels = kernels_on(output.device().type());
  totals.shares_memory = teams.shared() != nullptr;
  totals.why_not_shared =
      teams.num_hosts() > 1 ? c10::str("its ranks are on ", teams.num_hosts(), " hosts") : teams.why_not_shared();
}

std::vector<BucketTotals> ParameterGather::totals() {
  buckets_.times().end_step();
  buckets_.times().collect();
  std::vector<BucketTotals> totals;
  for (const GatheredModule& module : modules_) {
    totals.push_back(*module.totals);
  }
  return totals;
}

void ParameterGather::give_up() const {
  for (const auto& memory : memories_) {
    if (memory->teams.shared()) {
      memory->teams.shared()->give_up();
    }
  }
}

}  // namespace fastsync
