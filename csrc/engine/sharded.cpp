#include "engine/sharded.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "passes/backend.h"
#include "sums/plan.h"
#include "transport/host.h"

namespace fastsync {

namespace {

bool is_of(const EngineBucket& bucket, const at::Tensor& identity) {
  return bucket.parameters.front()._unsafe_get_target() == identity.unsafeGetTensorImpl();
}

double factor_of(const c10d::ReduceOp& op, int64_t num_ranks) {
  switch (op.op_) {
    case c10d::ReduceOp::AVG:
      return 1.0 / static_cast<double>(num_ranks);
    case c10d::ReduceOp::SUM:
      return 1.0;
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* factor = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      if (factor != nullptr && !factor->tensor_factor.defined()) {
        return factor->double_factor;
      }
      [[fallthrough]];
    }
    default:
      TORCH_CHECK_VALUE(false, "op: a reduce-scatter of fastsync's takes AVG, SUM and PREMUL_SUM with a number, got ",
                        "another one (", static_cast<int>(op.op_), ")");
  }
}

}  // namespace

ShardedState::ShardedState(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : EngineState(std::move(group), "fully_shard's modules"),
      backward_({[this] { return step_is_open_.load(); }, [this](int) { leave_step_last(); }, nullptr}) {}

void ShardedState::reduce_scatter(const at::Tensor& identity, const std::string& name, const at::Tensor& output,
                                  const at::Tensor& input, const c10d::ReduceOp& op, bool in_background) {
  TORCH_CHECK_VALUE(input.is_contiguous() && output.is_contiguous() && input.scalar_type() == output.scalar_type() &&
                        input.numel() == output.numel() * group_->getSize(),
                    "input: expected ", group_->getSize(), " times the output's ", output.numel(),
                    " values, contiguous and of its dtype, got ", input.numel(), " of ", input.scalar_type());
  const double factor = factor_of(op, group_->getSize());
  run(identity, name, input, /*same_for_all=*/false, in_background && input.is_cpu(),
      [&](BucketSync& bucket, const Sync& sync, std::shared_ptr<Stopwatch> stopwatch) {
        SumBuffers for_once;  // where an allocator keeps memory for all
        const auto make = [&](Bucket values) {
          const auto team = team_for(values, *bucket.totals());
          team->begin(/*attempt=*/0);
          if (shared_) {
            shared_->announce(known_buckets_[sync.index]->agreement->number);
          }
          SumBuffers& kept = team->shares_memory() ? shared_buffers_ : next_buffers_;
          Plan plan = fastsync::reduce_scatter(team, sync.tag, values, output, factor);
          return planned_sum(std::move(plan), std::move(values), input.is_cpu() ? kept : for_once);
        };
        auto flight = bucket.send_by(make, input, sync, std::move(stopwatch));
        std::swap(buffers_, next_buffers_);  // only now: if that throws, the one before is still under way
        return flight;
      });
}

at::Tensor ShardedState::allocate_input(int64_t numel, at::ScalarType dtype) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const std::lock_guard<std::mutex> lock(mutex_);
  for (at::Tensor& kept : inputs_) {
    if (kept.defined() && kept.storage().use_count() > 1) {
      continue;
    }
    if (!kept.defined() || kept.numel() < bytes) {
      kept = at::empty({bytes}, at::kByte);
    }
    return at::empty({0}, dtype).set_(kept.storage(), /*storage_offset=*/0, {numel}, {1});
  }
  return at::empty({numel}, dtype);
}

void ShardedState::all_reduce(const at::Tensor& identity, const std::string& name, const at::Tensor& values) {
  TORCH_CHECK_VALUE(values.is_contiguous(), "values: expected contiguous ones");
  run(identity, name, values, /*same_for_all=*/true, /*in_background=*/false,
      [&](BucketSync& bucket, const Sync& sync, std::shared_ptr<Stopwatch> stopwatch) {
        return bucket.send({values}, sync, std::move(stopwatch));
      });
  use_on_current_stream(values);  // which another one has made, and may free as soon as fully_shard has read them
}

void ShardedState::run(const at::Tensor& identity, const std::string& name, const at::Tensor& values, bool same_for_all,
                       bool in_background, const Send& send) {
  check_not_forked("shard the model in the process that trains");
  TORCH_INTERNAL_ASSERT(identity.numel() == values.numel());
  if (values.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto bucket = find_or_add(identity, name, values.device());
  enter_step(identity);
  const int64_t step = step_ - 1;
  if (!have_agreed(*bucket->agreement, schedule_)) {
    agree(*bucket->agreement, "agreement on " + name, schedule_, step,
          settings(*schedule_, step) + c10::str(name, " with ", values.numel(), " values of ", values.scalar_type()),
          values.device());
    whereabouts_->rest();
  }
  TORCH_CHECK_VALUE(is_supported(values.scalar_type()), "fastsync: ", name, " has ", values.scalar_type(),
                    " gradients; fastsync handles float32, float64, float16 and bfloat16");
  const auto place = std::find(known_buckets_.begin(), known_buckets_.end(), bucket) - known_buckets_.begin();
  const Sync sync{compression_for(*schedule_, step, values.numel(), values.device()), step, static_cast<int64_t>(place),
                  first_tag(bucket->agreement->number)};
  const auto forget_scale = c10::make_scope_exit([&] {
    if (!same_for_all) {
      bucket->sync->set_scale({});  // it has followed what this rank got: the next one is agreed on anew
    }
  });
  if (bucket == bucket_under_way_) {
    finish();
  }
  const auto flight = send(*bucket->sync, sync, start_bucket(*bucket));
  const auto before = std::exchange(flight_, flight);
  bucket_under_way_ = bucket;
  if (before) {
    BucketSync::receive(*before);
  }
  if (!in_background || shared_) {
    finish();
  }
  BucketSync::check_sent(*flight);
}

void ShardedState::finish() {
  bucket_under_way_.reset();
  if (const auto flight = std::exchange(flight_, nullptr)) {
    BucketSync::receive(*flight);
    whereabouts_->rest();
  }
}

std::shared_ptr<EngineBucket> ShardedState::find_or_add(const at::Tensor& identity, const std::string& name,
                                                        c10::Device device) {
  const auto found = std::find_if(known_buckets_.begin(), known_buckets_.end(),
                                  [&](const auto& bucket) { return is_of(*bucket, identity); });
  if (found != known_buckets_.end()) {
    return *found;
  }
  forget_buckets([](const EngineBucket& bucket) { return bucket.parameters.front().expired(); });
  auto agreement = std::make_shared<Agreement>(*group_, name);
  return add_bucket({ParameterId(identity.getIntrusivePtr())}, std::move(agreement), name, device);
}

// A step is a backward. A pipeline's schedule hands gradients over outside of any: there it is over when the first of
// them come again.
void ShardedState::enter_step(const at::Tensor& identity) {
  const auto same = [&](const auto& bucket) { return is_of(*bucket, identity); };
  const bool is_outside = current_graph_task() == kNoGraphTask;
  const bool has_come = std::any_of(newest_buckets_.begin(), newest_buckets_.end(), same);
  if (!step_is_open_ || (is_outside ? has_come : backward_.is_interrupted())) {
    finish();  // of a backward that failed
    newest_buckets_.clear();
    begin_step();
    step_ += 1;
  }
  step_is_open_ = true;
  if (!is_outside) {
    Backward::enter({shared_from_this(), &backward_});
  }
  if (std::none_of(newest_buckets_.begin(), newest_buckets_.end(), same)) {
    newest_buckets_.push_back(*std::find_if(known_buckets_.begin(), known_buckets_.end(), same));
  }
}

// fully_shard reduce-scatters at the end of backward what it has not before, of each model without a parent in a call
// of its own: after all of those.
void ShardedState::leave_step_last() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] { self->leave_step(); });
}

void ShardedState::leave_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_is_open_ = false;
  finish();
  end_step();
}

std::shared_ptr<Team> ShardedState::team_for(const Bucket& bucket, BucketTotals& totals) {
  if (!team_) {
    team_ = make_team(group_, bucket.device);
    may_share_ = team_->sends_at_once() && team_->size() > 1;
  }
  share_memory(bucket);
  totals.shares_memory = shared_ != nullptr;
  totals.why_not_shared = why_not_;
  return shared_ ? shared_ : team_;
}

// Once, or anew where a bucket takes more: all ranks do so in the same call.
void ShardedState::share_memory(const Bucket& bucket) {
  const int64_t bytes = most_bytes(bucket, team_->size());
  if (!may_share_ || (shared_ && bytes <= shared_->region_bytes())) {
    return;
  }
  host_ = host_ ? host_ : Host::of(group_);
  shared_buffers_ = {};
  shared_.reset();
  if (host_->hosts().size() > 1) {
    why_not_ = c10::str("its ranks are on ", host_->hosts().size(), " hosts");
  } else {
    shared_ = SharedTeam::make(group_, host_, bytes, why_not_);
  }
  may_share_ = shared_ != nullptr;
}

}  // namespace fastsync
