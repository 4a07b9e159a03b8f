#include "engine/parameter_sync.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "engine/sample.h"
#include "passes/backend.h"

namespace fastsync {

namespace {

const char* word_for(Op op) { return op == Op::kSum ? "sum" : op == Op::kMeanOfUsed ? "mean_of_used" : "mean"; }

}  // namespace

ParameterSync::ParameterSync(EngineState& engine, const std::vector<at::Tensor>& parameters,
                             std::vector<std::string> names, int64_t bucket_cap_bytes, Op op,
                             const std::set<std::string>& sparse)
    : bucket_cap_bytes_(bucket_cap_bytes),
      context_{.engine = engine,
               .agreement = std::make_shared<Agreement>(*engine.group(), "the engine of parameter " + names.front()),
               .op = op} {
  context_.side_values.counts_users = op == Op::kMeanOfUsed;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool is_sparse = sparse.contains(names[i]);
    context_.parameters.emplace_back(parameters[i], std::move(names[i]), op, is_sparse);
  }
}

// ---- between steps --------------------------------------------------------------------------------------------------

// The ranks agree on a new name. A rank that has run out of batches cannot know the name, unless it begins to join.
void ParameterSync::piggyback(const std::string& name, const at::Tensor& value) {
  NamedValues& values = context_.side_values.named;
  TORCH_CHECK_VALUE(!context_.weight.is_joining() || !have_agreed() || values.has_slots(name, value), "name: '", name,
                    "' of shape ", value.sizes(), " is new, and ranks that have run out of batches cannot know ",
                    "it: piggyback it on the first sync inside join(), or on an earlier one, on every rank");
  if (!values.has_slots(name, value)) {
    context_.engine.agree_anew(c10::str("piggybacked value '", name, "' is new"));
  }
  values.put(name, value.detach().clone(at::MemoryFormat::Contiguous));
}

void ParameterSync::set_weight(double weight, bool have_hooks) {
  const int64_t step = context_.engine.step();
  const bool is_again = std::exchange(weighted_step_, step) == step;
  for (const Parameter& parameter : context_.parameters) {
    if (parameter.has_left_over() || (!have_hooks && is_again && parameter.has_own_gradient(/*has_hook=*/false))) {
      refuse_late_weight(parameter.name);
    }
  }
  if (!context_.weight.is_set()) {
    context_.engine.begin_weights();
  }
  context_.weight.set(weight);
}

void ParameterSync::set_joining(bool is_joining, std::string states) {
  states_ = std::move(states);
  context_.engine.agree_anew(is_joining ? "join() began" : "join() ended");
  context_.engine.liveness().set_joining(is_joining);
  context_.weight.set_joining(is_joining);
  context_.agreement->step_check.say_nothing();
}

void ParameterSync::make_revocable() {
  context_.engine.make_revocable();
  context_.engine.agree_anew("fastsync.Elastic takes its steps");
  set_signal(0.0F);
}

int64_t ParameterSync::set_signal(float signal) {
  context_.side_values.signal = signal;
  context_.signals.reset();
  return context_.engine.step();
}

double ParameterSync::num_active() { return context_.active.sum().item<double>(); }

bool ParameterSync::gradients_are_unchanged() {
  if (!context_.layout.is_made()) {
    return false;  // no step has left any
  }
  for (size_t index = 0; index < context_.parameters.size(); ++index) {
    const Parameter& parameter = context_.parameters[index];
    const at::Tensor tensor(parameter.id.lock());
    const bool counts = context_.layout.bucket_of(index) != Layout::kNone || (tensor.defined() && takes_part(tensor));
    if (tensor.defined() && counts && !parameter.averaged.is_still(tensor.grad())) {
      return false;
    }
  }
  return true;
}

std::vector<at::Tensor> ParameterSync::with_own_gradients(bool have_hooks) {
  std::vector<at::Tensor> found;
  for (const Parameter& parameter : context_.parameters) {
    if (parameter.has_own_gradient(have_hooks)) {
      found.push_back(parameter.lock());
    }
  }
  return found;
}

std::vector<ParameterSync::Piece> ParameterSync::pieces() {
  std::vector<Piece> pieces;
  for (const LayoutBucket& each : context_.layout.buckets) {
    for (const ShardPiece& piece : each.bucket->shard()) {
      pieces.emplace_back(each.parameters[piece.gradient], piece.begin, piece.means);
    }
  }
  return pieces;
}

int64_t ParameterSync::pieces_number() {
  int64_t newest = 0;
  for (const LayoutBucket& each : context_.layout.buckets) {
    newest = std::max(newest, each.bucket->shard_number());
  }
  return newest;
}

void ParameterSync::meet() {
  context_.engine.wait_for_ranks("the step of the optimizer", [&] { context_.shards->meet(); });
}

std::vector<std::vector<std::vector<ParameterSync::Place>>> ParameterSync::places() {
  std::vector<std::vector<std::vector<Place>>> places;
  for (const LayoutBucket& each : context_.layout.buckets) {
    auto& of_bucket = places.emplace_back();
    for (const auto& shard : each.bucket->shards()) {
      auto& of_rank = of_bucket.emplace_back();
      for (const ShardPiece& piece : shard) {
        of_rank.emplace_back(each.parameters[piece.gradient], piece.begin, piece.numel);
      }
    }
  }
  return places;
}

void ParameterSync::set_optimizer(std::string description) {
  optimizer_ = std::move(description);
  context_.engine.agree_anew("shard_optimizer was called");
}

void ParameterSync::set_shards(std::shared_ptr<Meeting> shards) {
  context_.shards = std::move(shards);
  for (Parameter& parameter : context_.parameters) {
    parameter.is_sparse = false;  // so that a sparse gradient is refused
  }
}

// The last tag of the last bucket is free: a plan that keeps shards without shared memory has at most two phases.
void ParameterSync::set_shards_apart() {
  const int tag = first_tag(context_.agreement->number) + kMaxBuckets * kTagsPerBucket - 1;
  const auto most_buckets = std::min<int64_t>(kMaxBuckets, static_cast<int64_t>(context_.parameters.size()));
  set_shards(std::make_shared<MeetingByMessages>(context_.engine.group(), device_to_agree_on(),
                                                 kNumStats * most_buckets, tag));
}

std::vector<int64_t> ParameterSync::num_writes() {
  std::vector<int64_t> all;
  for (const Parameter& parameter : context_.parameters) {
    all.push_back(parameter.averaged.num_writes(parameter.lock().grad()));
  }
  return all;
}

std::vector<bool> ParameterSync::have_other_values() {
  std::vector<at::Tensor> noted;
  std::vector<at::Tensor> current;
  for (const Parameter& parameter : context_.parameters) {
    noted.push_back(parameter.sample);
    current.push_back(sample_of(parameter.lock().grad()));
  }
  return differ(noted, current);
}

std::vector<std::vector<double>> ParameterSync::compare(const std::vector<double>& numbers, const std::string& what) {
  context_.engine.check_not_forked("step in the process that attached it, or call detach() in the child");
  std::vector<std::vector<double>> all;
  context_.engine.wait_for_ranks(what, [&] {
    context_.shards->tell(numbers);
    all = context_.shards->hear();
    for (const auto& theirs : all) {
      TORCH_CHECK(theirs.size() == numbers.size(), "another rank is not there, but averages gradients or is elsewhere ",
                  "in the optimizer: every rank has to call optimizer.step() after the same backwards, and its ",
                  "state_dict() too where ranks share no memory");
    }
  });
  return all;
}

void ParameterSync::put_sums_back(bool only_lone_ones) {
  for (Parameter& parameter : context_.parameters) {
    if (!only_lone_ones || !parameter.lock().grad().defined()) {
      parameter.put_sum_back();
    }
  }
}

void ParameterSync::take_over(ParameterSync& other) {
  for (size_t i = 0; i < context_.parameters.size(); ++i) {
    context_.parameters[i].take_over(other.context_.parameters[i]);
  }
}

// ---- one step -------------------------------------------------------------------------------------------------------

void ParameterSync::begin() {
  std::vector<Gradient> gradients;
  gradients.reserve(context_.parameters.size());
  for (Parameter& parameter : context_.parameters) {
    gradients.emplace_back(parameter);
  }
  forget_layout_if_changed(gradients);
  step_ = std::make_unique<Step>(context_, std::move(gradients));
  is_under_way_ = true;
}

void ParameterSync::send_rest() {
  step_->send_weight();
  if (!step_->has_sent_all()) {  // else there is nothing left to agree on
    agree_and_lay_out();
  }
  context_.engine.pass_agreement(*context_.agreement, step_->number());
  step_->send_rest();
}

void ParameterSync::fail_and_send_rest() {
  step_->fail();
  send_rest();
  step_->leave_behind();
}

void ParameterSync::receive() {
  const auto step = end();  // other threads wait for the lock from now on
  const auto rest = c10::make_scope_exit([this] { context_.engine.liveness().note_rest(); });
  step->receive();
}

void ParameterSync::abandon() {
  try {
    fail_and_send_rest();
  } catch (...) {
    if (is_under_way_) {  // else it was refused on all ranks, and is over
      end();
      context_.engine.liveness().note_rest();
    }
    throw;
  }
  receive();
}

std::unique_ptr<Step> ParameterSync::end() {
  is_under_way_ = false;
  return std::move(step_);
}

// ---- the layout, and the agreement on it ----------------------------------------------------------------------------

// If a step is refused, it is refused on every rank: no rank is left waiting, and the step is over. It looks at buffers
// only now, because a forward may have changed them, even a forward that a checkpoint repeats during backward.
void ParameterSync::agree_and_lay_out() {
  if (context_.buffers.have_changed()) {
    context_.engine.agree_anew("a buffer that is synced is of another shape or dtype");
  }
  try {
    if (!context_.layout.is_made()) {
      lay_out();
    } else if (!have_agreed()) {
      agree(/*init_sync=*/false);
    }
  } catch (const c10::ValueError&) {
    end();
    context_.engine.liveness().note_rest();
    throw;
  }
}

void ParameterSync::lay_out() {
  EngineState& engine = context_.engine;
  const std::vector<Gradient>& gradients = step_->gradients();
  const std::vector<size_t> order = step_->order();
  if (order.empty()) {
    return;  // no parameter requires a gradient, so this step sends nothing
  }
  agree(/*init_sync=*/false);  // first, so that all ranks refuse what one of them cannot send
  std::vector<at::Tensor> tensors;
  for (const Gradient& gradient : gradients) {
    const at::Tensor& tensor = gradient.tensor();
    const at::ScalarType dtype = grad_dtype_of(tensor);
    const auto& compressions = *engine.compressions();
    TORCH_CHECK_VALUE(!takes_part(tensor) || (is_supported(real_dtype_of(tensor)) &&
                                              (compressions.is_lossless() || !c10::isComplexType(dtype))),
                      "fastsync: the gradients of parameter ", gradient.parameter().name, " are ", dtype,
                      ", which cannot be synchronised with ", compressions.description);
    tensors.push_back(tensor);
  }
  std::vector<size_t> agreed_order;
  engine.wait_for_ranks("agreement on the order of gradients",
                        [&] { agreed_order = order_of_rank_0(*engine.group(), order, device_to_agree_on()); });
  // Sparse gradients come last, each in a bucket of its own: they are sent at the end of backward, see may_go_early.
  const auto sparse = std::ranges::stable_partition(
      agreed_order, [this](size_t index) { return !context_.parameters[index].is_sparse; });
  auto buckets = assign_buckets(tensors, {agreed_order.begin(), sparse.begin()}, bucket_cap_bytes_);
  for (const size_t index : sparse) {
    buckets.push_back({index});
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(buckets.size()) <= kMaxBuckets, "fastsync: gradients in ", buckets.size(),
                    " buckets, but there may be ", kMaxBuckets, " at most: use a larger bucket_cap_mb");
  Layout layout(tensors, std::move(buckets));
  for (size_t i = 0; i < layout.buckets.size(); ++i) {
    LayoutBucket& each = layout.buckets[i];
    std::vector<ParameterId> ids;
    for (const size_t index : each.parameters) {
      ids.push_back(context_.parameters[index].id);
    }
    each.bucket = engine.buckets().add(std::move(ids), context_.agreement, "bucket " + std::to_string(i),
                                       tensors[each.parameters.front()].device());
    each.bucket->set_mean_factor(sums() ? static_cast<double>(engine.group()->getSize()) : 1.0);
  }
  context_.side_values.flags.lay_out(layout.num_flags(), engine.group()->getSize());
  engine.buckets().set_newest_to_all();
  context_.layout = std::move(layout);
}

void ParameterSync::forget_layout_if_changed(const std::vector<Gradient>& gradients) {
  if (!context_.layout.is_made()) {
    return;
  }
  std::string change;
  for (size_t index = 0; index < gradients.size() && change.empty(); ++index) {
    change = context_.layout.change(index, gradients[index].tensor(), gradients[index].parameter().name);
  }
  if (!change.empty()) {
    context_.engine.buckets().save_and_forget();
    context_.layout = Layout();
    context_.engine.agree_anew(std::move(change));
  }
}

// It must not depend on which gradient got ready first, because the order in which a CPU's and a GPU's parameters get
// ready differs from rank to rank, and each device may have a backend of its own.
c10::Device ParameterSync::device_to_agree_on() const { return context_.parameters.back().lock().device(); }

void ParameterSync::agree(bool init_sync) {
  EngineState& engine = context_.engine;
  Agreement& agreement = *context_.agreement;
  std::ostringstream text;
  text << (agreement.number < 0 ? "a new engine" : c10::str("engine ", agreement.number)) << "\ninit_sync "
       << (init_sync ? "True" : "False") << "\nbucket_cap_mb " << static_cast<double>(bucket_cap_bytes_) / (1 << 20)
       << (context_.engine.is_revocable() ? "\nfastsync.Elastic True" : "") << "\nop " << word_for(context_.op)
       << (context_.weight.is_on() ? ", weighted\n" : "\n") << context_.buffers.description() << optimizer_ << states_;
  for (const Parameter& parameter : context_.parameters) {
    text << parameter.description(parameter.lock());
  }
  text << context_.side_values.named.newcomers();
  const int64_t step = step_ ? step_->number() : engine.step();
  engine.agree(agreement, "agreement", engine.compressions(), step, text.str(), device_to_agree_on());
  context_.side_values.named.make_slots();
  if (!step_) {
    engine.liveness().note_rest();
  }
}

}  // namespace fastsync
