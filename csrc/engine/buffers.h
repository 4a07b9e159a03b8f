// A model's buffers, which are brought together with the gradients: they travel as float32 behind the riders.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace fastsync {

class Buffers {
 public:
  // means: floating ones become their mean over the ranks, the rest what rank 0 has. Else all do.
  void set(std::vector<at::Tensor> buffers, bool means) {
    buffers_ = std::move(buffers);
    means_ = means;
  }
  bool exist() const { return !buffers_.empty(); }

  // The riders, with these behind them, empty where riders stay empty.
  at::Tensor board(const at::Tensor& riders, int64_t rank, c10::Device device, bool stay_empty) const;
  // From the sums over the ranks of what board returned; returns those of the riders. Where a rank has failed the
  // buffers stay what they are.
  at::Tensor arrive(const at::Tensor& sums, int64_t world_size) const;

 private:
  bool is_mean(const at::Tensor& buffer) const { return means_ && (buffer.is_floating_point() || buffer.is_complex()); }

  std::vector<at::Tensor> buffers_;
  bool means_ = false;
};

}  // namespace fastsync
