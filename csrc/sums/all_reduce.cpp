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
  AllReduceSum(std::shared_ptr<Team> team, Bucket bucket, at::Tensor& memory, bool is_for_future)
      : BucketSum(std::move(bucket)),
        team_(std::move(team)),
        is_left_out_(!is_for_future && team_->is_alone()),
        is_own_wire_(is_for_future && is_own_wire(bucket_.grads, bucket_.wire_dtype)) {
    bucket_.multiplier = 1.0 / static_cast<double>(team_->size());
    bucket_.limit = saturation_limit(bucket_.is_lossless ? DType::kFloat64 : bucket_.wire_dtype, team_->size());
    if (is_own_wire_) {
      memory.reset();
      wire_ = bucket_.grads.front().view({-1});
      return;
    }
    const auto& [flags, riders] = bucket_.extras;
    const int64_t num_flags = flags.defined() ? flags.numel() : 0;
    const int64_t num_riders = riders.defined() && bucket_.wire_dtype == DType::kFloat32 ? riders.numel() : 0;
    wire_ = send_buffer(memory, bucket_.num_values + num_flags + num_riders, scalar_type_of(bucket_.wire_dtype),
                        bucket_.device);
  }

  void send() override {
    bucket_.pack(bucket_.segments, bucket_.wire_dtype, wire_.data_ptr(), Turn(), /*seed=*/0);
    std::vector<at::Tensor> buffers{wire_};
    int64_t end = bucket_.num_values;
    const auto add = [&](const at::Tensor& values, bool goes_behind) {
      if (!values.defined() || !goes_behind) {
        return values.defined() ? buffers.emplace_back(values.clone()) : values;
      }
      put_values(values, wire_, end, /*stride=*/0, /*count=*/1);
      end += values.numel();
      return wire_.narrow(0, end - values.numel(), values.numel());
    };
    sums_of_extras_.flags = add(bucket_.extras.flags, !is_own_wire_);
    sums_of_extras_.riders = add(bucket_.extras.riders, !is_own_wire_ && bucket_.wire_dtype == DType::kFloat32);
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
    for (const at::Tensor* memory : {&wire_, &sums_of_extras_.flags, &sums_of_extras_.riders}) {
      use_on_current_stream(*memory);
    }
  }

  std::shared_ptr<Team> team_;  // until send: see Reduction
  bool is_left_out_;
  bool is_own_wire_;
  at::Tensor wire_;  // behind the gradients come the flags, then the riders if it is float32
  std::unique_ptr<Reduction> reduction_;
};

}  // namespace

std::unique_ptr<BucketSum> all_reduce_sum(std::shared_ptr<Team> team, Bucket bucket, at::Tensor& memory,
                                          bool is_for_future) {
  return std::make_unique<AllReduceSum>(std::move(team), std::move(bucket), memory, is_for_future);
}

}  // namespace fastsync
