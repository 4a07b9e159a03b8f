// A Step is one sync of all gradients of an engine. It lasts from the first gradient that is ready until the means
// over the ranks have come.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/bucket.h"
#include "engine/gradient.h"
#include "engine/layout.h"
#include "engine/passenger.h"
#include "engine/weight.h"

namespace fastsync {

class Synchronizer;

// Note [Steps]
// A step collects gradients by mark_ready: each gradient that is final, in any order and any number of them. Meanwhile
// send_full_buckets sends buckets that are full. Then send_rest sends everything else, and receive waits for the
// means and hands them out. A step sends its buckets in the same order on all ranks.
//
// If backward has failed, or send_rest has thrown, no more gradients come. Then fail is called, and send_rest sends nan
// for what is left. So the ranks stay in step, and a rank that did not fail is not misled. After that receive leaves
// the gradients alone. On a device those of buckets that went early may be means by then.
//
// A step owns what is under way. When it is destroyed, it lets go of tensors, streams and works, and no rank waits in
// vain.
class Step {
 public:
  // Takes a gradient for each parameter. The engine's layout must hold for their tensors.
  Step(Synchronizer& engine, std::vector<Gradient> gradients);
  // Breaks the agreement if the step has sent something, and not received all of it. See Note [Agreement].
  ~Step();

  int64_t number() const { return info_.number; }
  bool has_sent_all() const;

  // ---- collecting ----

  void mark_ready(size_t index);
  void mark_all_ready();
  void send_full_buckets();
  const std::vector<Gradient>& gradients() const { return gradients_; }
  // Returns the order of parameters by which a layout is made. First come those whose gradients got ready, then the
  // others from the last to the first. Frozen parameters are left out.
  std::vector<size_t> order() const;

  // ---- sending ----

  // Sends this rank's weight, once, if weights are on and the ranks have agreed. Returns at once. Weights go before
  // everything else.
  void send_weight();
  // Sends all buckets that are left. Before, the ranks must agree, and make a layout if there is anything to send.
  void send_rest();
  // Makes send_rest send nan in place of gradients from now on.
  void fail();
  // Has the background do what other ranks wait for, after a failure. So they need not wait for this rank's next
  // backward.
  void leave_behind();
  // Makes the streams of backward wait for what runs beside it, so that nothing writes to gradients later.
  void join_streams() const noexcept;

  // ---- receiving ----

  void receive();

 private:
  bool has_failed() const { return info_.has_failed; }
  const Layout& layout() const;
  bool may_go_early(size_t bucket) const;
  void send_next();
  void receive_beside();
  void wait_for_gradients(const LayoutBucket& bucket) const;
  at::Tensor side_values_to_send(c10::Device device, at::TensorList grads, const at::Tensor& weight);
  std::vector<at::Tensor> counted(const LayoutBucket& bucket) const;
  // The factors multiply the means, by flag; undefined if they are 1.
  void multiply_means(const LayoutBucket& bucket, const at::Tensor& factors_of_all) const;
  void take_means(const LayoutBucket& bucket, const BucketWork& work, const at::Tensor& factors_of_all);
  void note_unmeasured(const LayoutBucket& bucket);

  Synchronizer& engine_;
  StepInfo info_;
  bool is_collecting_ = true;
  std::vector<Gradient> gradients_;  // by parameter
  ClaimedMemory claimed_;
  std::vector<size_t> order_;                       // indices, as gradients got ready; kept while there is no layout
  std::vector<size_t> num_waiting_;                 // by bucket: how many gradients are not final
  std::vector<std::shared_ptr<BucketWork>> works_;  // the works of the buckets that were sent
  bool has_begun_to_send_ = false;
  bool has_received_ = false;
  size_t num_tried_ = 0;              // how many of them receive_beside has tried
  std::optional<WeightSum> weights_;  // set once this rank's weight was sent
};

}  // namespace fastsync
