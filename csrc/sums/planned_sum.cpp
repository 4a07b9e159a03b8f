#include "sums/planned_sum.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fastsync {

// A plan's memory is zero at first, because the gaps between gradients are added and encoded with the blocks around
// them.
PlannedSum::PlannedSum(FlatGradients gradients, SumMemory& memory, const SumNumber& number)
    : SumWork(std::move(gradients)),
      plan_(memory.plan),
      use_(plan_->shared ? plan_->shared->begin(number) : nullptr),
      transfers_(plan_->chunks.size() * plan_->num_phases()),
      num_driven_(plan_->num_phases() > 1 ? 0 : static_cast<int>(plan_->chunks.size())) {
  if (!memory.buffer.defined() || memory.buffer.numel() < plan_->bytes) {
    memory.buffer = plan_->team->allocate(plan_->bytes);
  }
  memory_ = memory.buffer;
}

bool PlannedSum::may_be_sent_again() const { return plan_->team->shares_memory() || !gradients_.device.is_cpu(); }

std::unique_ptr<Transfer>& PlannedSum::transfer(const Chunk& chunk, size_t phase) {
  return transfers_[index_of(chunk) * plan_->num_phases() + phase];
}

void PlannedSum::expect(const Chunk& chunk, size_t phase) {
  transfer(chunk, phase) = chunk.phases[phase].expect(memory_);
}

// Rows are expected as early as possible.
void PlannedSum::send() {
  for (const Chunk& chunk : plan_->chunks) {
    for (size_t phase = 0; phase < chunk.phases.size(); ++phase) {
      if (!chunk.phases[phase].overwrites_sent) {
        expect(chunk, phase);
      }
    }
  }
  keeps_own_ = gradients_.can_stay();
  for (const Chunk& chunk : plan_->chunks) {
    const std::vector<Range>& packed = keeps_own_ && chunk.own ? chunk.packed_for_others : chunk.packed;
    gradients_.pack(packed, plan_->packed_as, address(chunk.packed_at), chunk.position);
    if (chunk.position.is_last) {
      put_side_values(chunk.phases.front());
    }
    transfer(chunk, 0)->send();
  }
}

// ---- between phases -------------------------------------------------------------------------------------------------

void PlannedSum::drive() {
  if (!needs_driving() || has_driver_.exchange(true)) {
    return;
  }
  try {
    use_memory_on_current_stream();
    drive_all();
    driven_.set(gradients_.device);
  } catch (...) {
    error_ = std::current_exception();
    if (plan_->shared) {
      plan_->shared->regions()->give_up();  // so that nobody waits for this rank
    }
    set_driven(kFailed);
  }
}

// Goes through all chunks phase by phase, so that the chunks of one phase are on their way together.
void PlannedSum::drive_all() {
  for (size_t next = 1; next < plan_->num_phases(); ++next) {
    for (const Chunk& chunk : plan_->chunks) {
      transfer(chunk, next - 1)->wait_for_rows();
      if (chunk.phases[next].overwrites_sent) {
        transfer(chunk, next - 1)->wait_until_sent();
      }
      reduce(chunk, chunk.phases[next - 1]);
      if (chunk.phases[next - 1].side_values.count > 0) {
        sum_side_values(chunk.phases[next - 1].side_values);
        put_side_values(chunk.phases[next]);
      }
      if (chunk.phases[next].overwrites_sent) {
        expect(chunk, next);
      }
      transfer(chunk, next)->send();
      if (next + 1 == plan_->num_phases()) {
        set_driven(index_of(chunk) + 1);
      }
    }
  }
}

void PlannedSum::set_driven(int num_chunks) {
  num_driven_ = num_chunks;
  num_driven_.notify_one();
}

void PlannedSum::wait_until_driven(const Chunk& chunk) {
  int driven = num_driven_;
  for (; driven <= index_of(chunk); driven = num_driven_) {
    num_driven_.wait(driven);
  }
  if (driven == kFailed) {
    std::rethrow_exception(error_);
  }
}

void PlannedSum::reduce(const Chunk& chunk, const Phase& phase) {
  if (!phase.reduce) {
    return;
  }
  RECORD_FUNCTION("fastsync::reduce", {});
  const Reduce& reduce = *phase.reduce;
  for (size_t shard = 0; shard < reduce.outs.size(); ++shard) {
    const int64_t skipped = static_cast<int64_t>(shard) * reduce.num_values;
    const int64_t begin = reduce.begin + skipped;
    const int64_t num_values = std::min(reduce.num_values, chunk.end - begin);
    if (num_values <= 0) {
      break;
    }
    const void* const rows = address(phase.received.offset + bytes_of(skipped, reduce.dtype));
    ReduceArgs args = gradients_.reduce_args(rows, reduce.dtype, phase.received.count, phase.received.stride,
                                             num_values, address(reduce.outs[shard]), reduce.factor);
    if (gradients_.residual.defined()) {
      args.residual = gradients_.residual.narrow(0, begin, num_values).data_ptr();
      args.residual_share = reduce.residual_factor;
    }
    run_reduce(args, gradients_.device);
  }
}

// ---- side values, at the end of rows --------------------------------------------------------------------------------

// Writes the side values to the end of each row that this rank fills.
void PlannedSum::put_side_values(const Phase& phase) const {
  if (gradients_.side_bytes() == 0) {
    return;
  }
  const auto put = [&](const Rows& rows, int64_t first, int64_t count) {
    put_values(gradients_.side_values, memory_, rows.begin(first) + rows.length - gradients_.side_bytes(), rows.stride,
               count);
  };
  const int64_t rank = phase.team->rank();
  if (phase.is_gather) {
    put(phase.sent, rank, 1);
    return;
  }
  put(phase.sent, 0, phase.sent.count);  // needlessly also to this rank's own row
  if (rank < phase.sent.count) {
    put(phase.received, rank, 1);
  }
}

void PlannedSum::sum_side_values(const Rows& rows) {
  const at::Tensor sums = at::empty_like(gradients_.side_values);
  run_reduce({address(rows.offset), rows.count, rows.stride, sums.numel(), DType::kFloat32, DType::kFloat32,
              sums.data_ptr(), DType::kFloat32, /*multiplier=*/1.0, /*limit=*/std::numeric_limits<double>::infinity(),
              /*bucket_scale=*/nullptr, /*residual=*/nullptr},
             gradients_.device);
  gradients_.side_values = sums;
}

// ---- the end --------------------------------------------------------------------------------------------------------

// If unpacking fails, this waits until the thread that drives has ended. If that thread failed too, its error is thrown
// instead.
void PlannedSum::receive(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] { let_go_of_gradients(); });
  drive();
  driven_.wait();  // a rank that has nobody to send to gets no message either
  try {
    unpack_chunks(on_reduced);
  } catch (...) {
    if (!plan_->chunks.empty()) {
      wait_until_driven(plan_->chunks.back());
    }
    throw;
  }
  use_memory_on_current_stream();
}

// Unpacks chunks that have come while the rest is on its way. Another thread may still drive.
void PlannedSum::unpack_chunks(const std::function<void()>& on_reduced) {
  for (const Chunk& chunk : plan_->chunks) {
    const Rows& side_values = chunk.phases.back().side_values;
    const Rows& rows = chunk.unpacked_from;
    wait_until_driven(chunk);
    transfer(chunk, chunk.phases.size() - 1)->wait_for_rows();
    if (side_values.count > 0) {
      sum_side_values(side_values);
    }
    if (chunk.position.is_last) {
      on_reduced();
    }
    if (keeps_own_ && chunk.own) {
      gradients_.unpack_with_own(chunk.unpacked.front(), {*chunk.own, plan_->team->rank()}, address(rows.offset),
                                 rows.count, rows.stride, plan_->factor, chunk.position);
    } else {
      gradients_.unpack(chunk.unpacked, address(rows.offset), rows.count, rows.stride, plan_->factor, chunk.position);
    }
  }
  if (plan_->chunks.empty()) {
    on_reduced();
  }
  for (const auto& transfer : transfers_) {
    transfer->wait_until_sent();  // last, because by now it rarely has to wait
  }
  if (plan_->shared) {
    plan_->shared->have_read();
    use_.reset();
  }
}

int64_t PlannedSum::sent_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < transfers_.size(); ++i) {
    const auto& phases = plan_->chunks[i / plan_->num_phases()].phases;
    bytes += plan_->counts_as_sent(phases[i % plan_->num_phases()]) ? transfers_[i]->sent_bytes() : 0;
  }
  return bytes;
}

}  // namespace fastsync
