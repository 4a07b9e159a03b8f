#include "sums/bucket_sum.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fastsync {

// At full width, what lies between gradients in a block of int8 is added and encoded with the block. So a plan's memory
// is cleared once. What the process group adds up is all packed; off a CPU that is the allocator's, so that idle
// buckets hold no memory.
BucketSum::BucketSum(Bucket bucket, SumMemory& memory)
    : bucket_(std::move(bucket)),
      plan_(memory.plan),
      transfers_(plan_->pieces.size() * plan_->num_phases()),
      num_driven_(needs_driving() ? 0 : static_cast<int>(plan_->pieces.size())) {
  if (plan_->is_in_place) {
    memory_ = bucket_.grads.front().view({-1});
    return;
  }
  use_ = plan_->team->use_rows();
  if (plan_->is_all_reduce) {
    memory_ = send_buffer(memory.bytes, plan_->bytes, at::kByte, bucket_.device);
    return;
  }
  if (!memory.bytes.defined() || memory.bytes.numel() < plan_->bytes) {
    memory.bytes = plan_->team->allocate(plan_->bytes);
  }
  memory_ = memory.bytes;
}

std::unique_ptr<Transfer>& BucketSum::transfer(const Piece& piece, size_t phase) {
  return transfers_[index_of(piece) * plan_->num_phases() + phase];
}

void BucketSum::expect(const Piece& piece, size_t phase) {
  if (!plan_->is_all_reduce) {
    transfer(piece, phase) = piece.phases[phase].expect(memory_);
  }
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Rows are expected as early as possible, but not where rows that leave before still lie.
void BucketSum::send() {
  for (const Piece& piece : plan_->pieces) {
    for (size_t phase = 0; phase < piece.phases.size(); ++phase) {
      if (!piece.follows_in_place(phase)) {
        expect(piece, phase);
      }
    }
  }
  for (const Piece& piece : plan_->pieces) {
    if (plan_->is_all_reduce) {
      send_to_group(piece);
    } else {
      pack(piece);
      transfer(piece, 0)->send();
    }
  }
}

// Side values that do not lie behind the gradients travel in a collective of their own.
void BucketSum::send_to_group(const Piece& piece) {
  pack(piece);
  std::vector<at::Tensor> buffers{memory_};
  if (!plan_->is_in_place) {
    buffers.front() = memory_.narrow(0, 0, plan_->bytes).view(scalar_type_of(bucket_.wire_dtype));
  }
  if (bucket_.side_values.defined() && plan_->num_side_rows == 0) {
    buffers.push_back(bucket_.side_values = bucket_.side_values.clone());
  }
  transfer(piece, 0) = all_reduce(*plan_->team->group(), bucket_.device, buffers);
}

void BucketSum::pack(const Piece& piece) const {
  bucket_.pack(bucket_.cut(piece.packed), plan_->packed_as, address(piece.packed_at), piece.position);
  if (piece.position.is_last) {
    put_side_values(piece.phases.front());
  }
}

// ---- between phases -------------------------------------------------------------------------------------------------

void BucketSum::drive() {
  if (!needs_driving() || has_driver_.exchange(true)) {
    return;
  }
  try {
    use_memory();
    drive_all();
    driven_.set(bucket_.device);
  } catch (...) {
    error_ = std::current_exception();
    plan_->team->give_up();  // so that nobody waits for this rank
    set_driven(kFailed);
  }
}

void BucketSum::set_driven(int num_pieces) {
  num_driven_ = num_pieces;
  num_driven_.notify_one();
}

// A forked child lets go of nothing: the threads stayed behind that something may be under way on.
void BucketSum::abandon(std::unique_ptr<BucketSum> sum) {
  if (getpid() != sum->process_id_) {
    sum.release();
  } else if (sum->needs_driving() && !sum->has_driver_ && sum->bucket_.device.is_cpu()) {
    sum->let_go_of_gradients();
    try {
      ProgressThread().post(c10::kCPU, [sum = std::shared_ptr<BucketSum>(std::move(sum))] { sum->drive(); });
    } catch (const std::exception&) {  // there is no thread: other ranks wait in vain
    }
  }
}

// Phase by phase for all pieces, so that the pieces of one phase are on their way together.
void BucketSum::drive_all() {
  for (size_t next = 1; next < plan_->num_phases(); ++next) {
    for (const Piece& piece : plan_->pieces) {
      const Phase& before = piece.phases[next - 1];
      transfer(piece, next - 1)->wait_for_rows();
      if (piece.follows_in_place(next)) {
        transfer(piece, next - 1)->wait_until_sent();
      }
      if (before.reduce) {
        reduce(piece, *before.reduce, before.from, piece.phases[next]);
      }
      if (piece.follows_in_place(next)) {
        expect(piece, next);
      }
      transfer(piece, next)->send();
      if (next + 1 == plan_->num_phases()) {
        set_driven(index_of(piece) + 1);
      }
    }
  }
}

void BucketSum::reduce(const Piece& piece, const Reduce& reduce, const Rows& from, const Phase& next) {
  RECORD_FUNCTION("fastsync::reduce", {});
  if (reduce.adds_side_values) {
    sum_side_values(from, reduce.num_rows);
    put_side_values(next);
  }
  for (size_t part = 0; part < reduce.outs.size(); ++part) {
    const int64_t first = static_cast<int64_t>(part) * reduce.num_values;
    const int64_t begin = reduce.begin + first;
    const int64_t num_values = std::min(reduce.num_values, piece.end - begin);
    if (num_values <= 0) {
      break;
    }
    ReduceArgs args = bucket_.sum(address(from.offset + bytes_of(first, reduce.dtype)), reduce.dtype, reduce.num_rows,
                                  from.stride, num_values, address(reduce.outs[part]), reduce.share);
    if (bucket_.residual.defined()) {
      args.residual = bucket_.residual.narrow(0, begin, num_values).data_ptr();
      args.residual_share = reduce.residual_share;
    }
    run_reduce(args, bucket_.device);
  }
}

// ---- side values, at the end of rows --------------------------------------------------------------------------------

void BucketSum::put_side_values(const Phase& phase) const {
  if (plan_->num_side_rows > 0) {
    phase.for_own_rows([&](const Rows& rows, int64_t first, int64_t count) {
      put_values(bucket_.side_values, memory_, rows.begin(first) + rows.length - bucket_.side_bytes(), rows.stride,
                 count);
    });
  }
}

void BucketSum::sum_side_values(const Rows& rows, int64_t count) {
  if (plan_->num_side_rows == 0) {
    return;
  }
  const int64_t begin = rows.offset + rows.length - bucket_.side_bytes();
  if (plan_->is_all_reduce) {
    bucket_.side_values = memory_.narrow(0, begin, bucket_.side_bytes()).view(at::kFloat);
    return;
  }
  const at::Tensor sums = at::empty_like(bucket_.side_values);
  run_reduce({address(begin), count, rows.stride, sums.numel(), DType::kFloat32, DType::kFloat32, sums.data_ptr(),
              DType::kFloat32, /*multiplier=*/1.0, /*limit=*/std::numeric_limits<double>::infinity(),
              /*bucket_scale=*/nullptr, /*residual=*/nullptr},
             bucket_.device);
  bucket_.side_values = sums;
}

// ---- the end --------------------------------------------------------------------------------------------------------

// Where it fails, what another thread drives ends first, and why that has failed comes first.
void BucketSum::finish(const std::function<void()>& on_reduced) {
  const auto in_any_case = c10::make_scope_exit([this] { let_go_of_gradients(); });
  drive();
  driven_.wait();  // no message says so where a rank has nobody to send to
  try {
    receive(on_reduced);
  } catch (...) {
    wait_until_driven(plan_->pieces.back());
    throw;
  }
  use_memory();
}

// While another thread may drive: what has come is unpacked while the rest is on its way.
void BucketSum::receive(const std::function<void()>& on_reduced) {
  for (const Piece& piece : plan_->pieces) {
    wait_until_driven(piece);
    transfer(piece, piece.phases.size() - 1)->wait_for_rows();
    if (piece.position.is_last) {
      sum_side_values(plan_->side_values, plan_->num_side_rows);
      on_reduced();
    }
    unpack(piece);
  }
  if (plan_->pieces.empty()) {
    on_reduced();
  }
  for (const auto& transfer : transfers_) {
    transfer->wait_until_sent();  // of what has long been sent, so that nobody has to sleep for it
  }
  plan_->team->have_read();
  use_.reset();
}

void BucketSum::wait_until_driven(const Piece& piece) {
  int driven = num_driven_;
  for (; driven <= index_of(piece); driven = num_driven_) {
    num_driven_.wait(driven);
  }
  if (driven == kFailed) {
    std::rethrow_exception(error_);
  }
}

// They may be Python's, and a thread that lets go of those needs the interpreter: so they end where they came from.
void BucketSum::let_go_of_gradients() {
  bucket_.grads.clear();
  bucket_.nowhere.clear();
}

int64_t BucketSum::sent_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < transfers_.size(); ++i) {
    const auto& phases = plan_->pieces[i / plan_->num_phases()].phases;
    bytes += phases[i % plan_->num_phases()].is_counted ? transfers_[i]->sent_bytes() : 0;
  }
  return bytes;
}

void BucketSum::unpack(const Piece& piece) const {
  std::vector<Segment> to;
  if (bucket_.output.defined()) {
    void* const part = advance(bucket_.output.data_ptr(), bytes_of(piece.begin, bucket_.grad_dtype));
    to = {{part, piece.end - piece.begin, /*offset=*/0}};
  } else {
    to = bucket_.cut(piece.unpacked);
  }
  bucket_.unpack(to, address(piece.wires.offset), plan_->num_wires, piece.wires.stride, piece.position, plan_->factor);
}

// Made on backward's stream or beside it.
void BucketSum::use_memory() const {
  use_on_current_stream(memory_);
  use_on_current_stream(bucket_.side_values);
}

}  // namespace fastsync
