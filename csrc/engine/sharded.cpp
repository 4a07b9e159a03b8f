#include "engine/sharded.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <memory>

#include "engine/backward.h"
#include "passes/backend.h"

namespace fastsync {

namespace {

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
      TORCH_CHECK_VALUE(false, "op: fastsync's reduce-scatter takes AVG, SUM and PREMUL_SUM with a number, got ",
                        "another one (", static_cast<int>(op.op_), ")");
  }
}

}  // namespace

ShardedState::ShardedState(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : EngineState(std::move(group), "fully_shard's modules") {}

void ShardedState::reduce_scatter(const at::Tensor& identity, const std::string& name, const at::Tensor& output,
                                  const at::Tensor& input, const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(input.is_contiguous() && output.is_contiguous() && input.scalar_type() == output.scalar_type() &&
                        input.numel() == output.numel() * group_->getSize(),
                    "input: expected ", group_->getSize(), " times the output's ", output.numel(),
                    " values, contiguous and of its dtype, got ", input.numel(), " of ", input.scalar_type());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!teams_) {
      teams_.emplace(group_, input.device());
    }
  }
  const SendOptions::Scatter scatter{output, factor_of(op, group_->getSize()), *teams_,
                                     input.is_cpu() ? &memory_ : nullptr};
  run(identity, name, input, &scatter);
}

void ShardedState::all_reduce(const at::Tensor& identity, const std::string& name, const at::Tensor& values) {
  TORCH_CHECK_VALUE(values.is_contiguous(), "values: expected contiguous ones");
  run(identity, name, values, /*scatter=*/nullptr);
  // Another stream has made the values, and may free them as soon as fully_shard has read them.
  use_on_current_stream(values);
}

void ShardedState::run(const at::Tensor& identity, const std::string& name, const at::Tensor& values,
                       const SendOptions::Scatter* scatter) {
  check_not_forked("shard the model in the process that trains");
  TORCH_INTERNAL_ASSERT(identity.numel() == values.numel());
  if (values.numel() == 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto bucket = buckets_.find_or_add({identity}, name, values.device());
  enter_step(bucket);
  agree_on_bucket(*bucket, name, compressions_,
                  [&] { return c10::str(name, " with ", values.numel(), " values of ", values.scalar_type()); });
  TORCH_CHECK_VALUE(is_supported(values.scalar_type()), "fastsync: ", name, " has ", values.scalar_type(),
                    " gradients; fastsync handles float32, float64, float16 and bfloat16");
  SendOptions options{compressions_->at(values.numel()), step_under_way(), first_tag(bucket->agreement->number)};
  options.scatter = scatter;
  options.number.id = scatter ? bucket->agreement->number : -1;
  auto if_it_fails = c10::make_scope_exit([&] {
    if (scatter) {
      bucket->set_scale({});  // because it has followed this rank's shard alone; the ranks agree on the next one anew
    }
  });
  const auto work = bucket->send({values}, options, start_bucket(*bucket));
  work->receive();
  if_it_fails.release();
  if (scatter) {
    bucket->follow_all_shards(scatter->factor);
  }
  liveness_->note_rest();
}

void ShardedState::give_up() const {
  EngineState::give_up();
  if (teams_) {
    teams_->give_up();
  }
}

// A step is a backward. A pipeline's schedule hands gradients over outside of any backward. There a new step begins
// when one of the step's buckets comes again.
void ShardedState::enter_step(const std::shared_ptr<Bucket>& bucket) {
  const bool is_outside = current_graph_task() == kNoGraphTask;
  const auto& newest = buckets_.newest();
  const bool has_come = std::find(newest.begin(), newest.end(), bucket) != newest.end();
  if (newest.empty() || (is_outside ? has_come : backward_.expired())) {
    buckets_.clear_newest();
    begin_step();
    take_number();
    if (!is_outside) {
      const auto token = std::make_shared<char>();
      torch::autograd::Engine::get_default_engine().queue_callback([token] {});
      backward_ = token;
    }
  }
  if (newest.empty() || !has_come) {
    buckets_.add_newest(bucket);
  }
}

}  // namespace fastsync
