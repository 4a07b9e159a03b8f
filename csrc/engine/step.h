// One sync of all gradients of an engine, from the first that is ready until the averages have come.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_state.h"
#include "engine/gradient.h"
#include "engine/layout.h"
#include "engine/model_buffers.h"
#include "engine/parameter.h"
#include "engine/side_values.h"
#include "engine/weight.h"

namespace fastsync {

// What the steps of an engine share: it lasts from one step to the next.
struct StepContext {
  EngineState& engine;
  const std::shared_ptr<Agreement> agreement;  // of all its buckets
  const bool sums;                             // gradients become the sum over the ranks, and not the mean
  std::vector<Parameter> parameters = {};
  Layout layout = {};  // made in the first step
  SideValues side_values = {};
  Weight weight = {};
  ModelBuffers buffers = {};

  // The results of the newest step.
  NamedValues::Tensors means = {};  // what was piggybacked on it
  at::Tensor active = {};           // see WeightSum
};

// Note [Steps]
// A step collects gradients: mark_ready for each one that is final, in any order and any number of them. Meanwhile
// send_full_buckets sends what can be sent already. Then send_rest sends everything else, and receive waits for the
// averages and hands them out. In place of send_rest, or after it threw, fail sends what is left as nan: backward has
// failed, and there will be no more gradients. So the ranks stay in step, and one that did not fail is not misled.
// After that receive leaves the gradients alone. A step sends its buckets in the same order on all ranks.
//
// It owns what is under way. When it is destroyed, tensors, streams and works are let go of, and no rank has to wait.
class Step {
 public:
  // One gradient for each parameter, of tensors that the layout holds for. The context outlives the step.
  Step(StepContext& context, std::vector<Gradient> gradients);

  int64_t number() const { return number_; }
  bool has_sent_all() const { return layout().is_made() && works_.size() == layout().buckets.size(); }

  // ---- collecting ----

  void mark_ready(size_t index);
  void mark_all_ready();
  void send_full_buckets();
  const std::vector<Gradient>& gradients() const { return gradients_; }
  // The order that a layout is made by: first the gradients that got ready, then the others from the last parameter to
  // the first. Frozen parameters are left out.
  std::vector<size_t> order() const;

  // ---- sending ----

  // Sends this rank's weight, once, if weights are on and the ranks have agreed. Returns at once. Weights go before
  // everything else.
  void send_weight();
  // By then the ranks have agreed, and made a layout if there is anything to send.
  void send_rest();
  // From now on nan is sent in place of gradients.
  void fail() { state_ = State::kFailed; }
  // After a failure: the background does what other ranks wait for, so that they need not wait for the next backward.
  void leave_behind();

  // ---- receiving ----

  void receive();

 private:
  enum class State { kCollecting, kSent, kFailed };

  bool has_failed() const { return state_ == State::kFailed; }
  const Layout& layout() const { return context_.layout; }
  EngineState& engine() const { return context_.engine; }
  bool have_agreed() const { return engine().have_agreed(*context_.agreement, engine().compressions()); }
  bool may_go_early(size_t bucket) const;
  void send_next();
  void wait_for_gradients(const LayoutBucket& bucket) const;
  at::Tensor side_values_to_send(c10::Device device, const std::vector<at::Tensor>& grads);
  void hand_out();
  void hand_out(const LayoutBucket& bucket, bool counts_what_arrives);
  void take_side_values();

  StepContext& context_;
  const int64_t number_;
  State state_ = State::kCollecting;
  std::vector<Gradient> gradients_;                 // by parameter
  std::vector<size_t> order_;                       // of indices, as gradients got ready; kept while there is no layout
  std::vector<size_t> num_waiting_;                 // by bucket: gradients that are not ready
  std::vector<std::shared_ptr<BucketWork>> works_;  // of the buckets that were sent
  std::optional<WeightSum> weights_;                // once this rank's was sent
};

}  // namespace fastsync
