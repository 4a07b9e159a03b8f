#include "engine/bucket.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <system_error>
#include <utility>

#include "passes/aten/passes.h"
#include "passes/backend.h"
#include "passes/graph_memory.h"
#include "sums/all_reduce_sum.h"
#include "sums/plan.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

int64_t numel_of(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

// Whether ranks add in shared memory, unless they have found out that they cannot. They do not if the compression names
// nodes that are no hosts.
bool uses_shared_memory(const Teams& teams, const SendOptions& options) {
  const int64_t ranks_per_node = options.compression.ranks_per_node;
  const bool is_across_hosts = teams.num_hosts() > 1;
  return options.may_share_memory && teams.can_share() && !(options.scatter && is_across_hosts) &&
         (ranks_per_node == 1 || teams.hosts_have(ranks_per_node));
}

// Returns the team of this host if its ranks add in shared memory, else the team of all ranks. Before a single host has
// room in its memory, both have the same ranks.
std::shared_ptr<Team> team_for(const PlanKey& key, const Teams& teams) {
  return key.shares_memory && teams.shared() ? teams.shared() : teams.all();
}

// The nodes of two levels are the hosts if ranks share memory, else the nodes that the compression names.
Plan plan_for(const PlanKey& key, Teams& teams) {
  if (key.algorithm != Algorithm::kTwoLevel) {
    return make_plan(key, team_for(key, teams));
  }
  const Team& all = *teams.all();
  return make_plan(key, key.shares_memory ? teams.hosts() : levels_of(all, nodes_of(key.ranks_per_node, all.size())));
}

}  // namespace

// ---- a sum under way ------------------------------------------------------------------------------------------------

BucketWork::~BucketWork() {
  join_streams();
  if (sum_) {
    SumWork::abandon(std::move(sum_));
  }
}

// The task does nothing if the work is gone by then. It takes this thread's state along, so that a profiler sees what
// happens on the other thread.
void BucketWork::drive_later(const std::shared_ptr<BucketWork>& work, ProgressThread& progress) {
  if (!work->sum_->needs_driving()) {
    return;
  }
  const WithoutPythonObjects without_python;
  auto drive = at::wrapPropagateTLSState([weak = std::weak_ptr(work)] {
    if (const auto driven = weak.lock()) {
      driven->sum_->drive();
    }
  });
  try {
    progress.post(work->bucket_->device(), std::move(drive), /*is_urgent=*/true);
  } catch (const std::system_error&) {  // there is no thread: receive does it
  }
}

// The task runs at once, and its errors are for the thread that calls receive.
void BucketWork::receive_beside(ProgressThread& progress) {
  const auto is_shared = [](const at::Tensor& gradient) { return gradient.storage().use_count() > 1; };
  if (receive_sends() || std::ranges::any_of(sum_->gradients().grads, is_shared)) {
    return;
  }
  progress.post(bucket_->device(), [this, stream = current_stream(bucket_->device())] {
    unpacked_to_ = sum_->gradients().grads;
    called_on_ = stream;
    try {
      finish();
    } catch (...) {
      error_ = std::current_exception();
    }
    unpacked_.set(bucket_->device());
  });
}

// A destructor calls it, too. So it throws nothing: if the device has failed, the next call of torch says so.
void BucketWork::join_streams() const noexcept {
  if (unpacked_to_.empty() || !sum_->is_of_this_process()) {
    return;
  }
  try {
    const c10::StreamGuard guard(*called_on_);
    unpacked_.wait();
  } catch (...) {
  }
}

void BucketWork::receive() {
  if (unpacked_to_.empty()) {
    finish();
    return;
  }
  unpacked_.wait();
  unpacked_to_.clear();
  use_on_current_stream(side_values());
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void BucketWork::finish() {
  try {
    bucket_->guard([&] { sum_->finish([&] { stopwatch_->mark(Mark::kReduced); }); });
  } catch (...) {
    bucket_->agreement->is_broken = true;
    throw;
  }
  bucket_->note_unmeasured(sum_->unmeasured());
  bucket_->totals_->wire_bytes += sum_->sent_bytes();
  stopwatch_->mark(Mark::kDone);
}

void BucketWork::discard() {
  if (unpacked_to_.empty()) {
    sum_->gradients().unpack_to_nowhere();
  }
  receive();
}

// ---- send -----------------------------------------------------------------------------------------------------------

Bucket::Bucket(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::string& name, c10::Device device,
               std::shared_ptr<Liveness> liveness, std::vector<ParameterId> parameters,
               std::shared_ptr<Agreement> agreement)
    : parameters(std::move(parameters)),
      agreement(std::move(agreement)),
      device_(device),
      teams_(std::move(group), device_),
      failure_(c10::str("fastsync: averaging ", name, " failed on rank ", teams_.all()->rank(), " of ",
                        teams_.all()->size())),
      liveness_(std::move(liveness)),
      stats_(at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(device_))),
      workspace_(std::make_shared<Workspace>(device_)) {
  totals_->kernels = kernels_on(device_.type());
}

std::shared_ptr<BucketWork> Bucket::send(std::vector<at::Tensor> grads, const SendOptions& options,
                                         std::shared_ptr<Stopwatch> stopwatch, const at::Tensor& side_values,
                                         const std::vector<bool>& stand_in) {
  const WithoutPythonObjects without_python;
  liveness_->note_averaging(options.step);
  auto sum = grads.front().is_sparse() ? make_sparse_sum(grads.front(), options, *stopwatch, side_values)
                                       : make_dense_sum(std::move(grads), options, *stopwatch, side_values, stand_in);
  totals_->num_syncs += 1;
  TORCH_CHECK(!is_half_sent_, failure_,
              ": it has failed before, while it was sent, so the ranks no longer meet in one ",
              "message: begin anew with another process group");
  guard([&] {
    is_half_sent_ = !sum->may_be_sent_again();
    sum->send();
    is_half_sent_ = false;
  });
  if (is_capturing(device_)) {  // asked first, because the list costs more
    hold_for_graph(device_,
                   {scale_, stats_, workspace_->totals(), sum->gradients().residual, memory_for(options).buffer});
  }
  stopwatch->mark(Mark::kSent);
  auto work = std::make_shared<BucketWork>();
  work->sum_ = std::move(sum);
  work->bucket_ = shared_from_this();
  work->stopwatch_ = std::move(stopwatch);
  return work;
}

std::unique_ptr<SumWork> Bucket::make_dense_sum(std::vector<at::Tensor> grads, const SendOptions& options,
                                                Stopwatch& stopwatch, const at::Tensor& side_values,
                                                const std::vector<bool>& stand_in) {
  FlatGradients gradients = flatten(std::move(grads), options, side_values);
  if (options.may_be_taken_back) {
    const at::Tensor scale = this->scale();
    before_ = Before{options.step, scale.defined() ? scale.clone() : scale, feedback_.residuals(), low_rank_.factors};
  }
  take_largest();
  if (needs_scale(options.compression)) {
    agree_on_scale(gradients);
  } else if (options.compression.wire != DType::kFloat16) {
    has_scale_ = false;  // it does not follow the gradients while another wire is in use
  }
  if (options.compression.low_rank == 0) {
    low_rank_ = LowRankState();
    guard([&] { choose_plan(gradients, options, memory_for(options)); });
  }
  stopwatch.mark(Mark::kStart);
  gradients.scale = has_scale_ ? scale_ : at::Tensor();
  if (options.keeps_shard) {
    gradients.output = shard_means_;
  }
  if (options.keeps_shard || options.scatter) {
    scale_sent_ = has_scale_ ? scale_.clone() : at::Tensor();
  }
  totals_->numel = numel_of(gradients.grads);
  has_followed_ = !options.scatter;  // the statistics of a shard do not tell what all ranks have
  std::unique_ptr<SumWork> sum;
  guard([&] {
    if (options.compression.error_feedback) {
      feedback_.lend(gradients, stand_in);
    } else {
      feedback_ = ErrorFeedback();
    }
    sum = make_sum(std::move(gradients), options);
  });
  return sum;
}

// Other rows come in each step, so neither residuals nor a scale last from step to step. Only wires of single values
// carry them.
std::unique_ptr<SumWork> Bucket::make_sparse_sum(const at::Tensor& gradient, SendOptions options, Stopwatch& stopwatch,
                                                 const at::Tensor& side_values) {
  TORCH_CHECK(!is_capturing(device_), "fastsync: a CUDA graph cannot hold a step with sparse gradients; use ",
              "sparse=False in the embedding, or train without the graph");
  stopwatch.mark(Mark::kStart);
  const std::optional<DType> wire = options.compression.wire;
  options.compression = Compression();
  if (wire && unit_of(*wire).values == 1) {
    options.compression.wire = wire;
  }
  const at::Tensor coalesced = gradient.coalesce();
  FlatGradients values = flatten({coalesced._values().contiguous()}, options, side_values);
  totals_->is_sparse = true;
  totals_->numel = numel_of(values.grads);
  return std::make_unique<SparseSum>(std::move(values), coalesced._indices().select(0, 0).contiguous(), gradient,
                                     teams_.all(), options.tag, options.has_failed);
}

FlatGradients Bucket::flatten(std::vector<at::Tensor> grads, const SendOptions& options,
                              const at::Tensor& side_values) {
  const DType wire = options.compression.wire_dtype(dtype_of(grads.front().scalar_type()));
  FlatGradients gradients(std::move(grads), wire, device_, options.keeps_shard ? kPieceValues : 1);
  gradients.side_values = side_values;
  gradients.output = options.scatter ? options.scatter->output : at::Tensor();
  gradients.mean_factor = mean_factor_;
  gradients.weight = options.weight;
  if (options.is_weighted_mean) {  // one rank may count for almost all of the mean, so no more than that may travel
    gradients.multiplier = 1.0 / static_cast<double>(teams_.all()->size());
  }
  gradients.stats = stats_;
  gradients.needs_stats = options.needs_stats || is_capturing(device_);  // a graph's replays have what it captures
  gradients.workspace = workspace_;
  return gradients;
}

PlanKey Bucket::plan_key(const FlatGradients& gradients, const SendOptions& options, const Teams& teams) const {
  const Compression& compression = options.compression;
  const int64_t numel = numel_of(gradients.grads);
  const bool is_shared = uses_shared_memory(teams, options);
  const bool is_across_hosts = is_shared && teams.num_hosts() > 1;
  return {.algorithm = options.scatter   ? Algorithm::kReduceScatter
                       : is_across_hosts ? Algorithm::kTwoLevel
                                         : algorithm_for(compression, gradients.grad_dtype, numel, *teams.all(),
                                                         is_shared, /*ranks_add=*/options.keeps_shard),
          .between_nodes = is_across_hosts ? rank_sum_for(compression, gradients.grad_dtype, numel, teams.num_hosts())
                                           : Algorithm::kTwoShot,
          .ranks_per_node = compression.ranks_per_node,
          .shares_memory = is_shared,
          .region_bytes = is_shared && teams.shared() ? teams.shared()->region_bytes() : 0,
          .tag = options.tag,
          .grad_dtype = gradients.grad_dtype,
          .wire_dtype = gradients.wire_dtype,
          .num_values = options.scatter ? options.scatter->output.numel() : gradients.num_values,
          .side_bytes = gradients.side_bytes(),
          .keeps_shard = options.keeps_shard,
          .rows_add_up = options.is_weighted_mean,
          .factor = options.scatter ? options.scatter->factor : mean_factor_};
}

// Makes a new plan if the key has changed. If it needs more shared memory than there is, all ranks make room in the
// same send, or find out that they cannot share memory.
void Bucket::choose_plan(const FlatGradients& gradients, const SendOptions& options, SumMemory& memory) {
  Teams& teams = options.scatter ? options.scatter->teams : teams_;
  const int64_t num_hosts = teams.hosts().num_nodes;
  PlanKey key = plan_key(gradients, options, teams);
  if (memory.key != key) {
    planned_for_.reset();
    if (key.shares_memory && !teams.has_room(plan_for(key, teams).bytes)) {
      memory = SumMemory();  // because it belongs to the shared memory that there is now
      teams.make_room(plan_for(with_room_for_side_values(key), teams).bytes);
      key = plan_key(gradients, options, teams);
    }
    if (options.keeps_shard) {
      check_may_shard(key, options);  // before the key stays, so that the next send is refused as well
    }
    const bool has_plan = key.algorithm != Algorithm::kAllReduce;
    memory.plan = has_plan ? std::make_shared<const Plan>(plan_for(key, teams)) : nullptr;
    memory.key = key;
    if (options.keeps_shard) {
      make_shards(gradients);
    }
    if (!options.scatter) {
      memory.buffer.reset();  // because another plan has left bytes where gaps between gradients must be zero
    }
  }
  if (planned_for_ != options.compression) {
    stats_.select(0, kNumSaturated).zero_();  // because a sum that needs no packing does not write it
  }
  planned_for_ = options.compression;
  totals_->shares_memory = key.shares_memory;
  totals_->num_hosts = key.shares_memory ? num_hosts : 1;
  totals_->why_not_shared =
      options.scatter && num_hosts > 1 ? c10::str("its ranks are on ", num_hosts, " hosts") : teams.why_not_shared();
}

void Bucket::check_may_shard(const PlanKey& key, const SendOptions& options) const {
  TORCH_CHECK(key.shares_memory || key.algorithm != Algorithm::kTwoLevel,
              "shard_optimizer takes a ranks_per_node that is the number of ranks of each host; leave one of them out");
  TORCH_CHECK(key.shares_memory == options.may_share_memory,
              "shard_optimizer needs sums in shared memory, and there are none any more",
              teams_.why_not_shared().empty() ? "" : ", because " + teams_.why_not_shared());
}

void Bucket::make_shards(const FlatGradients& gradients) {
  static std::atomic<int64_t> number = 0;
  const Plan& plan = *memory_.plan;
  shards_.assign(plan.shards.size(), {});
  shard_number_ = ++number;
  for (int64_t rank = 0; rank < static_cast<int64_t>(shards_.size()); ++rank) {
    const std::vector<Range>& ranges = plan.shards[rank];
    const bool is_own = rank == plan.team->rank();
    if (is_own) {
      const int64_t numel = ranges.empty() ? 0 : ranges.back().offset + ranges.back().end - ranges.back().begin;
      shard_means_ = at::zeros({numel}, gradients.grads.front().options());
    }
    for (const Range& range : ranges) {
      for (size_t i = 0; i < gradients.segments.size(); ++i) {
        const Segment& segment = gradients.segments[i];
        const int64_t begin = std::max(range.begin, segment.offset);
        const int64_t end = std::min(range.end, segment.offset + segment.numel);
        if (begin < end) {
          const int64_t offset = range.offset + begin - range.begin;
          shards_[rank].push_back({i, begin - segment.offset, end - begin,
                                   is_own ? shard_means_.narrow(0, offset, end - begin) : at::Tensor()});
        }
      }
    }
  }
}

const std::vector<ShardPiece>& Bucket::shard() const {
  static const std::vector<ShardPiece> none;
  return shards_.empty() ? none : shards_[memory_.plan->team->rank()];
}

std::unique_ptr<SumWork> Bucket::make_sum(FlatGradients gradients, const SendOptions& options) {
  return options.compression.low_rank > 0 ? make_low_rank_sum(std::move(gradients), options)
                                          : make_sum(std::move(gradients), options, memory_for(options));
}

// A LowRankSum has multiplied the gradients by the weight before it makes its sums.
std::unique_ptr<SumWork> Bucket::make_low_rank_sum(FlatGradients gradients, SendOptions options) {
  TORCH_CHECK(!options.keeps_shard, "shard_optimizer keeps shards of the means, and lowrank needs whole matrices; ",
              "leave one of them out");
  TORCH_CHECK(!is_capturing(device_), "a CUDA graph cannot hold a step with lowrank; capture with int8 and error ",
              "feedback, or train without the graph");
  options.weight.reset();
  options.in_place = false;
  return std::make_unique<LowRankSum>(
      std::move(gradients), low_rank_, options.compression.low_rank,
      [this, options](std::vector<at::Tensor> values, SumMemory& memory, const at::Tensor& side_values) {
        FlatGradients flat = flatten(std::move(values), options, side_values);
        choose_plan(flat, options, memory);
        return make_sum(std::move(flat), options, memory);
      });
}

// A step may have two sums, so their numbers are those of half steps.
std::unique_ptr<SumWork> Bucket::make_sum(FlatGradients gradients, const SendOptions& options, SumMemory& memory) {
  const auto team = team_for(*memory.key, options.scatter ? options.scatter->teams : teams_);
  const int64_t is_second = &memory == &low_rank_.of_right ? 1 : 0;
  team->begin(options.step_count > 0 ? 2 * options.step_count + is_second : 0,
              options.scatter ? agreement->number : -1);
  if (memory.plan) {
    auto sum = std::make_unique<PlannedSum>(std::move(gradients), memory);
    if (options.scatter && !options.scatter->memory) {
      memory.buffer.reset();  // the device's allocator keeps it for the next bucket, in the order of streams
    }
    return sum;
  }
  return std::make_unique<AllReduceSum>(std::move(gradients), teams_.all(), memory.buffer,
                                        /*is_lossless=*/!options.compression.wire, options.in_place);
}

// ---- the scale and the statistics -----------------------------------------------------------------------------------

// After a sum in which all values are zero or not finite, nothing tells the right scale. On CUDA the host would have to
// wait to know that. There the scale rises step by step instead, see next_bucket_scale.
bool Bucket::has_lost_scale() const {
  const double* stats = readable(stats_);
  return stats != nullptr && has_followed_ && stats[kMaxMagnitude] == 0.0;
}

// The first scale follows from the largest magnitude of the gradients on all ranks. That takes one pass, and one number
// to reduce. Later scales follow the means. All of it happens on the device, and no host waits.
void Bucket::agree_on_scale(const FlatGradients& gradients) {
  aten::measure(gradients.grads, stats_);
  at::Tensor largest = stats_.narrow(0, kMaxMagnitude, 1).clone();
  if (gradients.weight.defined()) {
    largest.mul_(gradients.weight);
  }
  guard([&] { all_reduce(*teams_.all()->group(), device_, {{largest, c10d::ReduceOp::MAX}})->wait_for_rows(); });
  const at::Tensor otherwise = has_scale_ ? scale_ : at::ones_like(largest, at::kFloat);
  set_scale(at::where(largest > 0, aten::power_of_two(aten::scale_exponent_for(largest)), otherwise));
}

// In a CUDA graph the ranks agree anew in each sum, because nothing that was sent outside of it may come inside.
void Bucket::follow_all_shards(double factor) {
  const WithoutPythonObjects without_python;
  if (!has_scale_ || is_capturing(device_)) {
    set_scale({});
    return;
  }
  const double share = factor * static_cast<double>(teams_.all()->size());
  largest_ = stats_.narrow(0, kMaxMagnitude, 1).div(share);
  guard([&] { largest_comes_ = all_reduce(*teams_.all()->group(), device_, {{largest_, c10d::ReduceOp::MAX}}); });
}

void Bucket::take_largest() {
  if (!largest_comes_) {
    return;
  }
  if (is_capturing(device_)) {
    set_scale({});
    return;
  }
  const auto transfer = std::move(largest_comes_);
  guard([&] { transfer->wait_for_rows(); });
  use_on_current_stream(largest_);
  if (const double* const largest = readable(largest_)) {
    scale_.fill_(next_bucket_scale(scale_sent_.item<float>(), *largest));
  } else {
    scale_.copy_(aten::next_scale(scale_sent_, largest_));
  }
}

void Bucket::set_scale(const at::Tensor& scale) {
  largest_comes_.reset();
  has_scale_ = scale.defined();
  has_followed_ = false;
  if (has_scale_ && scale_.defined()) {
    scale_.copy_(scale);
  } else if (has_scale_) {
    scale_ = scale;
  }
}

void Bucket::take_back(int64_t step) {
  if (before_ && before_->step == step) {
    set_scale(before_->scale);
    feedback_.set_residuals(before_->residuals);
    low_rank_.factors = before_->factors;
    before_.reset();
  }
}

void Bucket::drop_from_shard(size_t gradient) {
  bool has_values = false;
  for (const ShardPiece& piece : shard()) {
    if (piece.gradient == gradient && piece.means.any().item<bool>()) {
      piece.means.zero_();
      has_values = true;
    }
  }
  if (has_values) {
    measure({shard_means_});
  }
}

void Bucket::take_stats(const std::vector<const double*>& all) {
  std::array<double, kNumStats> stats{};
  for (const double* const theirs : all) {
    for (const Stat stat : {kSumOfSquares, kNumNonfinite, kNumSaturated}) {
      stats[stat] += theirs[stat];
    }
    stats[kMaxMagnitude] = std::max(stats[kMaxMagnitude], theirs[kMaxMagnitude]);
  }
  stats_.copy_(at::from_blob(stats.data(), {kNumStats}, at::kDouble));
  if (scale_sent_.defined() && has_scale_) {
    scale_.fill_(next_bucket_scale(scale_sent_.item<float>(), stats[kMaxMagnitude] / mean_factor_));
  }
}

void Bucket::note_unmeasured(const at::Tensor& means) {
  const std::lock_guard<std::mutex> lock(unmeasured_mutex_);
  unmeasured_.reset();
  if (means.defined()) {
    unmeasured_.emplace(means.getIntrusivePtr(), means._version());
  }
}

// It is the pass that the sync has left out, so it gives the same bits.
void Bucket::take_left_out_stats() {
  const std::lock_guard<std::mutex> lock(unmeasured_mutex_);
  if (!unmeasured_) {
    return;
  }
  const at::Tensor means(unmeasured_->first.lock());
  TORCH_CHECK(
      means.defined() && means._version() == unmeasured_->second, "fastsync: nobody had asked for grad_stats() ",
      "before the newest sync, and its gradients have changed since: call grad_stats() before they are clipped, ",
      "unscaled or set to zero. Once it was called, each sync takes the statistics");
  FlatGradients gradients({means}, dtype_of(means.scalar_type()), device_);
  gradients.stats = stats_;
  gradients.workspace = workspace_;
  gradients.unpack(gradients.all_values(), means.data_ptr(), /*num_wires=*/1, /*stride=*/0, /*factor=*/1.0, Position());
  unmeasured_.reset();
}

void Bucket::measure(const std::vector<at::Tensor>& grads) {
  const at::Tensor largest = stats_.select(0, kMaxMagnitude).clone();
  aten::measure(grads, stats_);
  stats_.select(0, kMaxMagnitude).copy_(largest);
}

}  // namespace fastsync
