// The sum that the process group takes, in the wire's dtype.
#include <ATen/ATen.h>

#include "sums/bucket_sum.h"

namespace fastsync {

bool is_own_wire(const std::vector<at::Tensor>& grads, DType wire) {
  return grads.size() == 1 && dtype_of(grads.front().scalar_type()) == wire;
}

namespace {

class AllReduceSum final : public BucketSum {
 public:
  AllReduceSum(std::shared_ptr<Team> team, Bucket bucket, SumMemory& memory, bool is_for_future)
      : BucketSum(std::move(bucket)),
        team_(std::move(team)),
        is_left_out_(!is_for_future && team_->is_alone()),
        is_own_wire_(is_for_future && is_own_wire(bucket_.grads, bucket_.wire_dtype)) {
    bucket_.multiplier = 1.0 / static_cast<double>(team_->size());
    bucket_.limit = saturation_limit(bucket_.is_lossless ? DType::kFloat64 : bucket_.wire_dtype, team_->size());
    if (is_own_wire_) {
      memory.bytes.reset();
      wire_ = bucket_.grads.front().view({-1});
      return;
    }
    is_behind_ = side_values_.defined() && bucket_.wire_dtype == DType::kFloat32;
    wire_ = send_buffer(memory.bytes, bucket_.num_values + (is_behind_ ? side_values_.numel() : 0),
                        scalar_type_of(bucket_.wire_dtype), bucket_.device);
  }

  void send() override {
    bucket_.pack(bucket_.segments, bucket_.wire_dtype, wire_.data_ptr(), Turn());
    std::vector<at::Tensor> buffers{wire_};
    if (is_behind_) {
      put_values(side_values_, wire_, bucket_.num_values, /*stride=*/0, /*count=*/1);
      side_values_ = wire_.narrow(0, bucket_.num_values, side_values_.numel());
    } else if (side_values_.defined()) {
      side_values_ = buffers.emplace_back(side_values_.clone());
    }
    if (is_left_out_) {
      buffers.clear();
    }
    reduction_ = std::exchange(team_, nullptr)->all_reduce(buffers);
    sent_bytes_ = reduction_->sent_bytes();
  }

  Reduction::Future when_over() override { return reduction_->when_over(); }

 private:
  void receive(const std::function<void()>& on_reduced) override {
    reduction_->wait_for_rows();
    on_reduced();
    if (is_own_wire_ && !bucket_.scale.defined()) {
      bucket_.measure();
    } else {
      bucket_.unpack(bucket_.segments, wire_.data_ptr(), /*num_wires=*/1, /*stride=*/0, Turn());
    }
  }

  void use_memory() const override {
    use_on_current_stream(wire_);
    use_on_current_stream(side_values_);
  }

  std::shared_ptr<Team> team_;  // until send: see Reduction
  bool is_left_out_;
  bool is_own_wire_;
  bool is_behind_ = false;  // the side values, the gradients on the wire
  at::Tensor wire_;
  std::unique_ptr<Reduction> reduction_;
};

}  // namespace

std::unique_ptr<BucketSum> all_reduce_sum(std::shared_ptr<Team> team, Bucket bucket, SumMemory& memory,
                                          bool is_for_future) {
  return std::make_unique<AllReduceSum>(std::move(team), std::move(bucket), memory, is_for_future);
}

}  // namespace fastsync
