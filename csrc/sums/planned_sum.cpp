// Runs a plan. See Note [Plans].
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <cstring>
#include <limits>

#include "sums/bucket_sum.h"

namespace fastsync {

namespace {

class PlannedSum final : public BucketSum {
 public:
  PlannedSum(Plan plan, Bucket bucket, SumMemory& memory)
      : BucketSum(std::move(bucket)), plan_(std::move(plan)), kept_(memory) {
    take_memory();
  }

  Owned owned() const override { return plan_.owned(bucket_); }

  // Rows are expected as early as possible, but not where rows that leave before still lie.
  void send() override {
    for (Piece& piece : plan_.pieces) {
      for (size_t i = 0; i < piece.phases.size(); ++i) {
        if (i == 0 || !follows_in_place(piece, i)) {
          piece.phases[i].expect(memory_);
        }
      }
    }
    for (Piece& piece : plan_.pieces) {
      send_packed(piece);
    }
  }

  bool needs_driving() const override { return num_phases() > 1; }

 private:
  size_t num_phases() const { return plan_.pieces.empty() ? 0 : plan_.pieces.front().phases.size(); }
  void* address(int64_t offset) const { return advance(memory_.data_ptr(), offset); }
  int64_t side_bytes() const { return side_values_.defined() ? static_cast<int64_t>(side_values_.nbytes()) : 0; }

  // At full width, what lies between gradients in a block of int8 is added and encoded with the block. So memory that
  // was last used with another layout is cleared. A reduce-scatter reads nothing that nobody has written: its memory
  // may be that of several buckets, one after the other.
  void take_memory() {
    use_ = plan_.team->use_rows();
    std::vector<int64_t> layout;
    if (!plan_.output.defined()) {
      layout = {bucket_.num_values, static_cast<int64_t>(bucket_.wire_dtype),
                side_bytes(),       static_cast<int64_t>(num_phases()),
                plan_.num_wires,    plan_.team->size()};
    }
    const bool fits =
        kept_.bytes.defined() && kept_.bytes.scalar_type() == at::kByte && kept_.bytes.numel() >= plan_.bytes;
    if (!fits || kept_.layout != layout) {
      kept_ = {plan_.team->allocate(plan_.bytes), std::move(layout)};
    }
    memory_ = kept_.bytes;
  }

  static bool follows_in_place(const Piece& piece, size_t phase) {
    const Rows& before = piece.phases[phase - 1].to;
    return piece.phases[phase].to.offset == before.offset && piece.phases[phase].to.stride == before.stride;
  }

  // ---- packing ----

  // Others expect every piece, and tell messages apart by their order alone. So where one cannot be packed or sent, it
  // goes as nan, and so do those after it: see check_sent. In memory that ranks share nobody takes one sum for another,
  // so there it is sent again.
  void send_packed(Piece& piece) {
    Phase& first = piece.phases.front();
    try {
      failed_to_send() ? fill_with_nan(first) : pack(piece);
      first.transfer->send();
    } catch (...) {
      if (failed_to_send() || plan_.team->shares_memory() || !bucket_.device.is_cpu()) {
        throw;
      }
      failure_to_send_ = std::current_exception();
      kept_.layout.clear();  // it is cleared for the next sum
      fill_with_nan(first);
      first.transfer->send();
    }
  }

  void pack(const Piece& piece) const {
    bucket_.pack(bucket_.cut(piece.packed), plan_.packed_as, address(piece.packed_at), piece.turn);
    if (piece.turn.is_last) {
      put_side_values(piece.phases.front());
    }
  }

  // All bits are set in nan of any dtype, also as the scale of an int8 block.
  void fill_with_nan(const Phase& phase) const {
    phase.for_own_rows([&](const Rows& rows, int64_t first, int64_t count) {
      std::memset(address(rows.begin(first)), 0xFF, count * rows.stride);
    });
  }

  // ---- between phases ----

  // Phase by phase for all pieces, so that the pieces of one phase are on their way together.
  void drive_all() override {
    for (size_t next = 1; next < num_phases(); ++next) {
      for (Piece& piece : plan_.pieces) {
        wait_for_rows(piece.phases[next - 1]);
        const bool is_in_place = follows_in_place(piece, next);
        if (is_in_place) {
          piece.phases[next - 1].transfer->wait_until_sent();
        }
        if (piece.phases[next - 1].reduce) {
          reduce(*piece.phases[next - 1].reduce, piece.phases[next - 1].from, piece.phases[next]);
        }
        if (is_in_place) {
          piece.phases[next].expect(memory_);
        }
        piece.phases[next].transfer->send();
      }
    }
  }

  // Those of a CPU that sends may be written again once it has been waited for itself: who waits for that last, when it
  // has long happened, need not sleep for it.
  void wait_for_rows(Phase& phase) {
    phase.transfer->wait_for_rows();
    sent_bytes_ += phase.is_counted ? phase.transfer->sent_bytes() : 0;
  }

  void reduce(const Reduce& reduce, const Rows& from, const Phase& next) {
    RECORD_FUNCTION("fastsync::reduce", {});
    if (reduce.adds_side_values) {
      sum_side_values(from, reduce.num_rows);
      put_side_values(next);
    }
    at::Tensor residual;
    if (reduce.share_of_loss && bucket_.keeps_losses) {
      residual = at::zeros({static_cast<int64_t>(reduce.outs.size()) * reduce.num_values},
                           bucket_.residuals.front().options());
    } else if (!reduce.share_of_loss && bucket_.residual_of_sums.defined()) {
      residual = bucket_.residual_of_sums.narrow(0, reduce.values.place, reduce.num_values);
    }
    for (size_t part = 0; part < reduce.outs.size(); ++part) {
      const int64_t first = static_cast<int64_t>(part) * reduce.num_values;
      ReduceArgs args = bucket_.sum(address(from.offset + bytes_of(first, reduce.dtype)), reduce.dtype, reduce.num_rows,
                                    from.stride, reduce.num_values, address(reduce.outs[part]), reduce.share);
      args.residual = residual.defined() ? residual.narrow(0, first, reduce.num_values).data_ptr() : nullptr;
      encode_sum(args);
    }
    if (reduce.share_of_loss && residual.defined()) {
      bucket_.add_to_residuals(residual, reduce.values, *reduce.share_of_loss);
    }
  }

  // No pass leads from one 16-bit type to another wire at once.
  void encode_sum(ReduceArgs args) const {
    at::Tensor unencoded;
    if (args.wire_dtype != args.out_dtype && unit_of(args.wire_dtype).bytes < unit_of(DType::kFloat32).bytes) {
      unencoded = at::empty({args.numel}, memory_.options().dtype(at::kFloat));
      ReduceArgs sum = args;
      sum.out = unencoded.data_ptr();
      sum.out_dtype = DType::kFloat32;
      sum.residual = nullptr;
      run_reduce(sum, bucket_.device);
      args.wire = sum.out;
      args.wire_dtype = sum.out_dtype;
      args.num_wires = 1;
      args.multiplier = 1.0;
    }
    run_reduce(args, bucket_.device);
  }

  // ---- side values, at the end of rows ----

  void put_side_values(const Phase& phase) const {
    if (side_values_.defined()) {
      phase.for_own_rows([&](const Rows& rows, int64_t first, int64_t count) {
        put_values(side_values_, memory_, rows.begin(first) + rows.length - side_bytes(), rows.stride, count);
      });
    }
  }

  void sum_side_values(const Rows& rows, int64_t count) {
    if (!side_values_.defined()) {
      return;
    }
    const at::Tensor sums = at::empty_like(side_values_);
    run_reduce({address(rows.offset + rows.length - side_bytes()), count, rows.stride, sums.numel(), DType::kFloat32,
                DType::kFloat32, sums.data_ptr(), DType::kFloat32, /*multiplier=*/1.0,
                /*limit=*/std::numeric_limits<double>::infinity(), /*bucket_scale=*/nullptr, /*residual=*/nullptr},
               bucket_.device);
    side_values_ = sums;
  }

  // ---- the end ----

  void receive(const std::function<void()>& on_reduced) override {
    for (Piece& piece : plan_.pieces) {
      wait_for_rows(piece.phases.back());
      if (piece.turn.is_last) {
        sum_side_values(plan_.side_values, plan_.num_side_rows);
        on_reduced();
      }
      unpack(piece);
    }
    for (const Piece& piece : plan_.pieces) {
      for (const Phase& phase : piece.phases) {
        phase.transfer->wait_until_sent();
      }
    }
    plan_.team->have_read();
    use_.reset();
  }

  void unpack(const Piece& piece) const {
    std::vector<Segment> to;
    if (plan_.output.defined()) {
      void* const part = advance(plan_.output.data_ptr(), bytes_of(piece.begin, bucket_.grad_dtype));
      to = {{part, piece.end - piece.begin, /*offset=*/0}};
    } else {
      to = bucket_.cut(piece.unpacked);
    }
    bucket_.unpack(to, address(piece.wires.offset), plan_.num_wires, piece.wires.stride, piece.turn, plan_.factor);
  }

  // Made on backward's stream or beside it.
  void use_memory() const override {
    use_on_current_stream(memory_);
    use_on_current_stream(side_values_);
  }

  void give_up() override { plan_.team->give_up(); }

  Plan plan_;
  SumMemory& kept_;  // the bucket's, until send has returned
  at::Tensor memory_;
  std::shared_ptr<void> use_;  // of the memory
};

}  // namespace

std::unique_ptr<BucketSum> planned_sum(Plan plan, Bucket bucket, SumMemory& memory) {
  return std::make_unique<PlannedSum>(std::move(plan), std::move(bucket), memory);
}

}  // namespace fastsync
