// A model's buffers, which are brought together with the gradients: they travel as float32 among the side values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/weight.h"

namespace fastsync {

class Buffers {
 public:
  // The model's buffers by now: it may have put other tensors in their places.
  using Find = std::function<std::vector<at::Tensor>()>;

  // means: floating ones become their mean over the ranks, the rest what rank 0 has. Else all do. While ranks join,
  // those that still have gradients count alone, and the first of them is rank 0.
  void set(Find find, bool means) {
    find_ = std::move(find);
    means_ = means;
    look_up();
  }
  // Before a sync. Returns whether the ranks have to agree on them anew.
  bool look_up();
  bool exist() const { return !buffers_.empty(); }
  std::string description() const;  // on which the ranks have to agree

  // What travels, undefined where there are none. A rank that has failed leaves its slots empty.
  at::Tensor to_send(int64_t rank, const Weight& weight, c10::Device device, bool has_failed) const;
  // From the sums over the ranks. Where a rank has failed, or none has gradients, the buffers stay what they are.
  void arrive(const at::Tensor& sums, const Weight& weight, int64_t world_size) const;

 private:
  bool is_mean(const at::Tensor& buffer) const { return means_ && (buffer.is_floating_point() || buffer.is_complex()); }

  Find find_;
  std::vector<at::Tensor> buffers_;  // as they were found last
  bool means_ = false;
};

}  // namespace fastsync
