// A Step is one sync of all gradients of an engine. It lasts from the first gradient that is ready until the means
// over the ranks have come.
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
#include "transport/meeting.h"

namespace fastsync {

// The steps of an engine share this.
struct StepContext {
  EngineState& engine;
  const std::shared_ptr<Agreement> agreement;  // the agreement on all buckets
  const Op op;
  std::vector<Parameter> parameters = {};
  Layout layout = {};  // made in the first step
  SideValues side_values = {};
  Weight weight = {};
  ModelBuffers buffers = {};
  // Null unless ranks keep shards of the means. Then the gradients stay this rank's own, and the ranks tell each other
  // the statistics of their shards.
  std::shared_ptr<Meeting> shards = nullptr;
  bool expects_same_data = false;  // whether no rank is warned if all ranks have the same gradients in the first step

  // The results of the newest step.
  NamedValues::Tensors means = {};     // the means of what was piggybacked
  at::Tensor active = {};              // see WeightSum
  std::optional<double> signals = {};  // the sum of the signals, if there are any; nan if a rank has failed
  std::vector<bool> have_means = {};   // with shards: which parameters have means, by parameter
};

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
  // Takes a gradient for each parameter. The layout must hold for their tensors. The context must outlive the step.
  Step(StepContext& context, std::vector<Gradient> gradients);
  // Breaks the agreement if the step has sent something, and not received all of it. See Note [Agreement].
  ~Step();

  int64_t number() const { return number_; }
  bool has_sent_all() const { return layout().is_made() && works_.size() == layout().buckets.size(); }

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
  enum class State { kCollecting, kSent, kFailed };

  bool has_failed() const { return state_ == State::kFailed; }
  const Layout& layout() const { return context_.layout; }
  EngineState& engine() const { return context_.engine; }
  bool have_agreed() const { return engine().have_agreed(*context_.agreement, engine().compressions()); }
  bool may_go_early(size_t bucket) const;
  void send_next();
  void receive_beside();
  void wait_for_gradients(const LayoutBucket& bucket) const;
  at::Tensor side_values_to_send(c10::Device device, const std::vector<at::Tensor>& grads, const at::Tensor& weight);
  void hand_out();
  // The factors multiply the means, by flag; undefined if they are 1. kept_travels tells whether a kept gradient
  // travels as it is, see Note [Statistics of a step] in step.cpp.
  void hand_out(const LayoutBucket& bucket, const at::Tensor& factors_of_all, bool kept_travels);
  at::Tensor factors_of_used() const;
  void take_signals();
  void take_side_values();
  void find_means();
  void keep_gradients();
  void tell_stats();
  void hear_stats();

  StepContext& context_;
  const int64_t number_;
  State state_ = State::kCollecting;
  std::vector<Gradient> gradients_;  // by parameter
  ClaimedMemory claimed_;
  std::vector<size_t> order_;                       // indices, as gradients got ready; kept while there is no layout
  std::vector<size_t> num_waiting_;                 // by bucket: how many gradients are not final
  std::vector<std::shared_ptr<BucketWork>> works_;  // the works of the buckets that were sent
  bool has_begun_to_send_ = false;
  bool has_received_ = false;
  bool has_told_stats_ = false;
  size_t num_tried_ = 0;              // how many of them receive_beside has tried
  std::optional<WeightSum> weights_;  // set once this rank's weight was sent
};

}  // namespace fastsync
