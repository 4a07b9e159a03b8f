#include "engine/parameter_sync.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>

#include "engine/bucket_layout.h"
#include "transport/agreement.h"
#include "transport/without_python_objects.h"

namespace fastsync {

namespace {

// Complex gradients travel as the pairs of reals that they are.
at::ScalarType real_dtype(const at::Tensor& parameter) { return c10::toRealValueType(parameter.scalar_type()); }
at::Tensor as_reals(const at::Tensor& gradient) {
  return gradient.is_complex() ? at::view_as_real(gradient) : gradient;
}

// A tensor that only wraps others has none.
bool has_memory(const at::Tensor& tensor) {
  return !tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.numel() == 0 ||
         (tensor.has_storage() && tensor.storage().data() != nullptr);
}

// The same elements at the same places of a dense block of memory.
bool lies_like(const at::Tensor& gradient, const at::Tensor& parameter) {
  return gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense() &&
         gradient.scalar_type() == parameter.scalar_type() && gradient.device() == parameter.device() &&
         !gradient.is_conj() && !gradient.is_neg();
}

// Dense, whatever the gradient is, with the strides that every rank's parameter has.
at::Tensor new_stand_in(const at::Tensor& parameter) {
  return at::empty_like(parameter, at::TensorOptions(), at::MemoryFormat::Preserve);
}

}  // namespace

ParameterSync::ParameterSync(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                             c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes)
    : group_(std::move(group)),
      whereabouts_(Whereabouts::of(*group_, "the engine of parameter " + names.front())),
      bucket_cap_bytes_(bucket_cap_bytes),
      pairing_(*group_, "the engine of parameter " + names.front()) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters_.emplace_back(parameters[i], std::move(names[i]));
  }
}

// ---- one sync ---------------------------------------------------------------------------------------------------

void ParameterSync::begin() {
  for (Parameter& parameter : parameters_) {
    parameter.tensor = at::Tensor(parameter.id.lock());
    TORCH_CHECK(parameter.tensor.defined(), "fastsync: parameter ", parameter.name, " no longer exists");
    parameter.is_ready = false;
    parameter.stream.reset();
    parameter.stand_in.reset();
  }
  if (std::string change = is_laid_out_ ? layout_change() : ""; !change.empty()) {
    forget_layout();
    why_agree_ = std::move(change);
  }
  for (Bucket& bucket : buckets_) {
    bucket.num_waiting = bucket.parameters.size();
    bucket.flight.reset();  // of a sync that failed
  }
  order_.clear();
  next_bucket_ = 0;
  presence_.assign(presence_.size(), 0.0F);
  begin_pairing();
  is_under_way_ = true;
  num_steps_ += 1;
  times_.begin_step();
}

void ParameterSync::mark_ready(size_t index) {
  Parameter& parameter = parameters_[index];
  check(parameter);
  parameter.is_new = true;
  if (const c10::Device device = parameter.tensor.device(); !device.is_cpu()) {
    parameter.stream = current_stream(device);
  }
  const bool again = std::exchange(parameter.is_ready, true);
  if (!is_laid_out_) {
    parameter.repeats |= again;
    if (!again) {
      order_.push_back(index);
    }
    return;
  }
  if (parameter.bucket == kNone) {
    return;  // frozen since this sync began
  }
  Bucket& bucket = buckets_[parameter.bucket];
  const bool was_repeating = std::exchange(parameter.repeats, parameter.repeats || again);
  TORCH_CHECK(
      !again || parameter.bucket >= next_bucket_, "fastsync: parameter ", parameter.name,
      " got another gradient in the same backward after its bucket was sent, as a weight does that is shared ",
      "between reentrant checkpoints. From now on its bucket waits for the end of backward: run the step again, ",
      "on all ranks, after zero_grad()");
  if (!parameter.repeats) {
    bucket.num_waiting -= 1;
  } else if (!was_repeating) {
    bucket.num_waiting += 1;  // it had been counted as final
  }
}

void ParameterSync::mark_all_ready() {
  for (size_t index = parameters_.size(); index-- > 0;) {  // the order in which a backward would most likely come
    if (parameters_[index].tensor.grad().defined()) {
      mark_ready(index);
    }
  }
}

void ParameterSync::check(const Parameter& parameter) const {
  const at::Tensor& gradient = parameter.tensor.grad();
  TORCH_CHECK_VALUE(!gradient.defined() || gradient.layout() == at::kStrided, "fastsync: parameter ", parameter.name,
                    " got a sparse gradient, which fastsync does not handle; use sparse=False in the embedding");
  TORCH_CHECK_VALUE(!gradient.defined() || has_memory(gradient), "fastsync: parameter ", parameter.name,
                    " got a gradient of a tensor subclass that has no memory of its own, such as a DTensor; give it a ",
                    "plain one (DTensor.to_local(), full_tensor())");
}

void ParameterSync::send_full_buckets() {
  while (may_send_next()) {
    send_next();
  }
}

// Nothing that waits for other ranks may happen before the end of backward: which engine comes first is not the same on
// all ranks until then.
bool ParameterSync::may_send_next() const {
  if (!is_laid_out_ || !have_agreed_ || next_bucket_ == buckets_.size() || buckets_[next_bucket_].num_waiting > 0) {
    return false;
  }
  return !waits_to_send(buckets_[next_bucket_]);
}

bool ParameterSync::waits_to_send(const Bucket& bucket) const {
  const bool is_last = &bucket == &buckets_.back();
  return bucket.sync->waits_to_send(schedule_->at(step_, bucket.numel)) || (is_last && riders_.need_agreement());
}

bool ParameterSync::rest_waits() const {
  const auto next = buckets_.begin() + static_cast<std::ptrdiff_t>(next_bucket_);
  return group_->getSize() > 1 &&
         (!is_laid_out_ || !have_agreed_ ||
          std::any_of(next, buckets_.end(), [&](const Bucket& bucket) { return waits_to_send(bucket); }));
}

void ParameterSync::send_rest() {
  prepare();
  while (next_bucket_ < buckets_.size()) {
    send_next();
  }
}

// Accumulators that were made under several streams accumulate on several, and this may be yet another one.
void ParameterSync::wait_for_gradients(const Bucket& bucket) const {
  const c10::Device device = bucket.sync->device();
  if (device.is_cpu()) {
    return;
  }
  std::vector<c10::Stream> waited_for{current_stream(device)};
  for (const size_t index : bucket.parameters) {
    const auto& stream = parameters_[index].stream;
    if (stream && std::find(waited_for.begin(), waited_for.end(), *stream) == waited_for.end()) {
      c10::Event ready(device.type());
      ready.record(*stream);
      ready.block(waited_for.front());
      waited_for.push_back(*stream);
    }
  }
}

void ParameterSync::send_next() {
  Bucket& bucket = buckets_[next_bucket_];
  wait_for_gradients(bucket);
  std::vector<at::Tensor> grads;
  std::vector<bool> stand_in;
  grads.reserve(bucket.parameters.size());
  for (const size_t index : bucket.parameters) {
    grads.push_back(gradient_to_send(parameters_[index]));
    stand_in.push_back(presence_[parameters_[index].place] == 0.0F);
  }
  send(bucket, std::move(grads), /*is_poisoned=*/false, stand_in);
}

void ParameterSync::send(Bucket& bucket, std::vector<at::Tensor> grads, bool is_poisoned,
                         const std::vector<bool>& stand_in) {
  const c10::Device device = bucket.sync->device();
  const bool is_last = next_bucket_ + 1 == buckets_.size();
  Extras extras;
  if (is_last) {
    if (const auto* name = riders_.need_agreement()) {
      whereabouts_->agree(step_, c10::str("rider '", *name, "' is new"));
      wait_for_ranks("agreement on riders", [&] { riders_.agree(group_, device); });
    }
    extras = {flags(), is_poisoned ? riders_.empty_seats(device) : riders_.board(device)};
  }
  const auto index = static_cast<int>(next_bucket_);
  is_captured_ = is_capturing(device);
  const Sync sync{compression_for(*schedule_, step_, bucket.numel, device), step_, index,
                  tag_ + index * kTagsPerBucket};
  bucket.flight =
      bucket.sync->send(std::move(grads), sync, times_.start_bucket(bucket.sync->totals(), device), extras, stand_in);
  next_bucket_ += 1;
  if (is_last) {
    times_.end_step();
  }
  // While backward goes on, or another bucket is waited for, something else has to see to what follows on the arrival
  // of messages. To wake a thread for the only bucket, at the end of backward, would take longer than to do it here.
  // After a failure nobody waits for it here, perhaps for long.
  if (buckets_.size() > 1 || is_poisoned || !device.is_cpu()) {
    bucket.sync->drive_later(bucket.flight, strand_);
  }
}

// A parameter without a new gradient travels as what its gradient is, so that the mean is right where another rank has
// a new one: as zeros where there is none.
at::Tensor ParameterSync::gradient_to_send(Parameter& parameter) {
  const at::Tensor& gradient = parameter.tensor.grad();
  const bool is_present = parameter.is_new && gradient.defined();
  presence_[parameter.place] = is_present ? 1.0F : 0.0F;
  if (is_present && lies_like(gradient, parameter.tensor)) {
    return as_reals(gradient);
  }
  parameter.stand_in = new_stand_in(parameter.tensor);
  if (gradient.defined()) {
    check(parameter);
    parameter.stand_in.copy_(gradient);
  } else {
    parameter.stand_in.zero_();
  }
  return as_reals(parameter.stand_in);
}

void ParameterSync::receive() {
  is_under_way_ = false;
  const auto whatever_fails = c10::make_scope_exit([this] { end(); });
  for (const Bucket& bucket : buckets_) {
    BucketSync::receive(*bucket.flight);
  }
  hand_out();
  if (!buckets_.empty() && riders_.have_seats()) {
    riders_.arrive(BucketSync::extras(*buckets_.back().flight).riders, group_->getSize());
  }
  check_pairing();
}

void ParameterSync::check_pairing() {
  if (buckets_.empty() || !buckets_.back().flight || !has_new_stamp_) {
    return;
  }
  const auto size = static_cast<int64_t>(stamp_.size());
  const at::Tensor flags = BucketSync::extras(*buckets_.back().flight).flags;
  pairing_.arrive(flags.narrow(0, flags.numel() - size, size));
}

// Reads the flags on the host only where a gradient is missing here: nothing else tells whether it stays missing.
void ParameterSync::hand_out() {
  num_waits_ = counts_.defined() ? num_waits_ + 1 : 0;
  if (!is_captured_) {
    counts_.reset();
  }
  for (Parameter& parameter : parameters_) {
    if (parameter.bucket == kNone) {
      continue;
    }
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (parameter.stand_in.defined()) {
      use_on_current_stream(parameter.stand_in);
      const bool exists = presence_[parameter.place] > 0 || some_rank_has(parameter);
      if (exists && gradient.defined() && at::has_internal_overlap(gradient) != at::MemOverlap::Yes) {
        gradient.copy_(parameter.stand_in);
      } else if (exists) {
        gradient = parameter.stand_in;
      } else if (!gradient.defined()) {
        take_back(parameter);
      }
    } else {
      if (parameter.stream != current_stream(gradient.device())) {
        use_on_current_stream(gradient);
      }
      gradient.unsafeGetTensorImpl()->bump_version();  // the passes write through bare pointers
    }
    parameter.is_new = false;
    parameter.averaged.reset();
    if (gradient.defined()) {
      parameter.averaged.emplace(gradient.getIntrusivePtr());
      parameter.averaged_version = gradient._version();
    }
  }
  measure_what_was_handed_out();
}

// What error feedback sent of a gradient that nobody has goes nowhere, now.
void ParameterSync::take_back(Parameter& parameter) {
  Bucket& bucket = buckets_[parameter.bucket];
  const size_t index = parameter.place - parameters_[bucket.parameters.front()].place;
  if (bucket.sync->feedback().take_back(index, as_reals(parameter.stand_in))) {
    parameter.stand_in.reset();
    bucket.took_back = true;
  }
}

// Unpacking has counted what was taken back, too.
void ParameterSync::measure_what_was_handed_out() {
  for (Bucket& bucket : buckets_) {
    if (!std::exchange(bucket.took_back, false)) {
      continue;
    }
    std::vector<at::Tensor> handed_out;
    for (const size_t index : bucket.parameters) {
      const Parameter& parameter = parameters_[index];
      const at::Tensor& averaged = parameter.stand_in.defined() ? parameter.stand_in : parameter.tensor.grad();
      if (averaged.defined()) {
        handed_out.push_back(as_reals(averaged));
      }
    }
    bucket.sync->measure(handed_out);
  }
}

// A CUDA graph repeats what held in the step before it was captured.
bool ParameterSync::some_rank_has(const Parameter& parameter) {
  if (!counts_.defined()) {
    TORCH_CHECK(!is_captured_, "fastsync: parameter ", parameter.name,
                " has no gradient here, and whether another rank ",
                "has one cannot be found out while a CUDA graph is captured: take a step like this one before");
    counts_ = BucketSync::extras(*buckets_.back().flight).flags.to(at::kCPU, at::kFloat);
    warn_of_waiting();
  }
  return counts_.data_ptr<float>()[parameter.place] > 0;
}

void ParameterSync::warn_of_waiting() const {
  constexpr int64_t kMany = 100;
  if (num_waits_ != kMany || buckets_.back().sync->device().is_cpu()) {
    return;
  }
  for (const Parameter& parameter : parameters_) {
    if (parameter.bucket != kNone && counts_.data_ptr<float>()[parameter.place] == 0) {
      TORCH_WARN(
          "fastsync: parameter ", parameter.name, " has had no gradient on any rank for ", kMany, " steps. Each ",
          "step the host waits for the device to find that out; freeze what is not used (requires_grad_(False)), ",
          "and it no longer does");
      return;
    }
  }
}

bool ParameterSync::gradients_are_unchanged() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    const at::Tensor tensor(parameter.id.lock());
    if (parameter.bucket == kNone || !tensor.defined()) {
      return true;
    }
    const at::Tensor& gradient = tensor.grad();
    if (!gradient.defined() || !parameter.averaged) {
      return gradient.defined() == parameter.averaged.has_value();
    }
    return parameter.averaged->_unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
           parameter.averaged_version == gradient._version();
  });
}

void ParameterSync::send_poisoned_rest() {
  prepare();
  while (next_bucket_ < buckets_.size()) {
    send_poisoned();
  }
  whereabouts_->give_up();
}

void ParameterSync::discard() {
  is_under_way_ = false;
  const auto whatever_fails = c10::make_scope_exit([this] { end(); });
  for (const Bucket& bucket : buckets_) {
    if (bucket.flight) {
      BucketSync::discard(*bucket.flight);
    }
  }
  check_pairing();
}

void ParameterSync::abandon() {
  try {
    send_poisoned_rest();
  } catch (...) {
    if (is_under_way_) {  // else it was refused on all ranks, and is over
      is_under_way_ = false;
      end();
    }
    throw;
  }
  discard();
}

void ParameterSync::send_poisoned() {
  Bucket& bucket = buckets_[next_bucket_];
  std::vector<at::Tensor> grads;
  for (const size_t index : bucket.parameters) {
    const Parameter& parameter = parameters_[index];
    presence_[parameter.place] = 1.0F;
    grads.push_back(as_reals(new_stand_in(parameter.tensor).fill_(std::numeric_limits<double>::quiet_NaN())));
  }
  send(bucket, std::move(grads), /*is_poisoned=*/true);
}

void ParameterSync::end() {
  whereabouts_->rest();
  step_ += 1;
  for (Parameter& parameter : parameters_) {
    parameter.tensor.reset();
    parameter.stand_in.reset();
  }
  for (Bucket& bucket : buckets_) {
    bucket.flight.reset();
  }
}

void ParameterSync::begin_pairing() {
  std::vector<uint32_t> versions;
  versions.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) {
    // Ranks may do as they like with what is frozen.
    versions.push_back(takes_part(parameter) ? parameter.tensor._version() : 0);
  }
  pairing_.begin_step(step_, std::move(versions));
}

// The pairing's stamp changes with every step. On CUDA, where a change is a copy from the host, it is renewed in one
// step of several: the same ones on all ranks.
void ParameterSync::renew_stamp(c10::Device device) {
  constexpr int64_t kOnCuda = 16;
  has_new_stamp_ = !is_capturing(device) && (device.is_cpu() || num_stamps_ % kOnCuda == 0);
  num_stamps_ += 1;
  if (has_new_stamp_) {
    stamp_ = pairing_.stamp(engine_);
  }
}

// Which gradients are here, and behind that the stamp. Made anew only when it changes.
at::Tensor ParameterSync::flags() {
  const c10::Device device = buckets_.back().sync->device();
  renew_stamp(device);
  std::vector<float> flags = presence_;
  flags.insert(flags.end(), stamp_.begin(), stamp_.end());
  if (!flags_.defined() || flags != flagged_) {
    TORCH_CHECK(!is_capturing(device), "fastsync: other parameters have a gradient in the step that a CUDA graph ",
                "captures than in the one before it: take a step like this one before");
    const at::Tensor on_host =
        at::empty({static_cast<int64_t>(flags.size())}, at::TensorOptions().pinned_memory(!device.is_cpu()));
    std::copy(flags.begin(), flags.end(), on_host.data_ptr<float>());
    flags_ = on_host.to(device, /*non_blocking=*/true);
    flagged_ = std::move(flags);
  }
  if (is_capturing(device)) {
    captured_flags_.push_back(flags_);
  }
  return flags_;
}

// ---- the layout -------------------------------------------------------------------------------------------------

bool ParameterSync::takes_part(const Parameter& parameter) const {
  return parameter.tensor.requires_grad() && parameter.tensor.numel() > 0;
}

// Empty while the layout holds; else which parameter was frozen, unfrozen, moved or cast.
std::string ParameterSync::layout_change() const {
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    const bool is_in_bucket = parameter.bucket != kNone;
    if (takes_part(parameter) != is_in_bucket) {
      return c10::str("parameter ", parameter.name, is_in_bucket ? " was frozen" : " was unfrozen");
    }
    if (is_in_bucket && (tensor.numel() != parameter.numel || tensor.scalar_type() != parameter.dtype ||
                         tensor.device() != parameter.device)) {
      return c10::str("parameter ", parameter.name, " became another tensor");
    }
  }
  return "";
}

// What is refused is refused on every rank: none is left waiting, and the sync is over.
void ParameterSync::prepare() {
  try {
    if (!is_laid_out_) {
      lay_out();
    } else if (!have_agreed_) {
      agree();
    }
  } catch (const c10::ValueError&) {
    is_under_way_ = false;
    end();
    throw;
  }
}

void ParameterSync::lay_out() {
  std::vector<size_t> taking_part;
  std::vector<std::pair<at::ScalarType, c10::Device>> kinds;
  std::vector<ParameterSize> sizes;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    Parameter& parameter = parameters_[index];
    if (!takes_part(parameter)) {
      continue;
    }
    const at::Tensor& tensor = parameter.tensor;
    TORCH_CHECK_VALUE(is_supported(real_dtype(tensor)) && (schedule_->is_lossless() || !tensor.is_complex()),
                      "fastsync: parameter ", parameter.name, " is ", tensor.scalar_type(),
                      ", which cannot be synchronised with ", schedule_->description());
    parameter.numel = tensor.numel();
    parameter.dtype = tensor.scalar_type();
    parameter.device = tensor.device();
    const std::pair kind(real_dtype(tensor), tensor.device());
    auto found = std::find(kinds.begin(), kinds.end(), kind);
    found = found != kinds.end() ? found : kinds.insert(kinds.end(), kind);
    taking_part.push_back(index);
    sizes.push_back({static_cast<int64_t>(tensor.nbytes()), found - kinds.begin()});
  }
  if (taking_part.empty()) {
    return;  // nothing requires a gradient: nothing to send, this time
  }
  agree();
  const auto layout = lay_out_buckets(sizes, order_of_rank_0(taking_part), bucket_cap_bytes_);
  TORCH_CHECK_VALUE(static_cast<int64_t>(layout.size()) <= kMaxBuckets, "fastsync: gradients in ", layout.size(),
                    " buckets, but there may be ", kMaxBuckets, " at most: use a larger bucket_cap_mb");
  for (const auto& places : layout) {
    Bucket bucket;
    for (const int64_t place : places) {
      Parameter& parameter = parameters_[taking_part[place]];
      parameter.bucket = buckets_.size();
      parameter.place = presence_.size();
      presence_.push_back(0.0F);
      bucket.parameters.push_back(taking_part[place]);
      bucket.ids.push_back(parameter.id);
      bucket.numel += parameter.tensor.is_complex() ? 2 * parameter.numel : parameter.numel;
    }
    const c10::Device device = parameters_[bucket.parameters.front()].device;
    bucket.sync =
        std::make_shared<BucketSync>(group_, "bucket " + std::to_string(buckets_.size()), device, whereabouts_);
    bucket.sync->set_scale(saved_scales_.smallest_of(bucket.ids, device));
    bucket.sync->feedback().set_residuals(saved_residuals_.take(bucket.ids, device));
    buckets_.push_back(std::move(bucket));
  }
  is_laid_out_ = true;
}

// Rank 0's order for all, as places in taking_part: that in which its gradients got ready, then, from the last
// parameter to the first, those it has no gradient for.
std::vector<int64_t> ParameterSync::order_of_rank_0(const std::vector<size_t>& taking_part) {
  std::vector<size_t> indices = order_;
  for (auto index = taking_part.rbegin(); index != taking_part.rend(); ++index) {
    if (!parameters_[*index].is_ready) {
      indices.push_back(*index);
    }
  }
  std::vector<int64_t> order;
  for (const size_t index : indices) {
    const auto place = std::lower_bound(taking_part.begin(), taking_part.end(), index);
    if (place != taking_part.end() && *place == index) {
      order.push_back(place - taking_part.begin());
    }
  }
  const WithoutPythonObjects without_python;
  std::vector<at::Tensor> tensors{
      at::tensor(at::ArrayRef<int64_t>(order)).to(parameters_[taking_part.front()].tensor.device())};
  wait_for_ranks("agreement on the order of gradients", [&] { group_->broadcast(tensors)->wait(); });
  const at::Tensor of_rank_0 = tensors.front().cpu();
  return {of_rank_0.data_ptr<int64_t>(), of_rank_0.data_ptr<int64_t>() + of_rank_0.numel()};
}

void ParameterSync::forget_layout() {
  for (const Bucket& bucket : buckets_) {
    saved_scales_.record(bucket.ids, bucket.sync->scale());
    saved_residuals_.record(bucket.ids, bucket.sync->feedback().residuals());
    forgotten_totals_.add(bucket.sync->totals());
  }
  for (Parameter& parameter : parameters_) {
    parameter.bucket = kNone;
  }
  buckets_.clear();
  presence_.clear();
  flags_.reset();
  is_laid_out_ = false;
  have_agreed_ = false;
}

// ---- settings and agreement -------------------------------------------------------------------------------------

void ParameterSync::set_schedule(std::shared_ptr<const Schedule> schedule) {
  if (schedule_) {
    agree_anew("its compression was set");
  }
  schedule_ = std::move(schedule);
}

// Before the next sync.
void ParameterSync::agree_anew(std::string why) {
  why_agree_ = std::move(why);
  have_agreed_ = false;
}

// What fails in the call is no fault of the ranks' settings.
void ParameterSync::wait_for_ranks(const char* what, const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError&) {
    whereabouts_->rest();
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "fastsync: ", what, " failed on rank ", group_->getRank(), " of ", group_->getSize(), ": ",
                error.what(), whereabouts_->roll_call());
  }
}

void ParameterSync::agree() {
  c10::Device device = c10::kCPU;
  std::ostringstream text;
  text << schedule_->description() << "\n"
       << (engine_ < 0 ? "a new engine" : "engine " + std::to_string(engine_)) << "\n"
       << "bucket_cap_mb " << static_cast<double>(bucket_cap_bytes_) / (1 << 20) << "\n"
       << "step " << step_ << "\n"
       << saved_scales_.description() << "\n";
  for (const Parameter& parameter : parameters_) {
    const at::Tensor tensor(parameter.id.lock());
    TORCH_CHECK(tensor.defined(), "fastsync: parameter ", parameter.name, " no longer exists");
    text << "parameter " << parameter.name << " of shape " << tensor.sizes() << ", strides " << tensor.strides() << ", "
         << tensor.scalar_type() << (tensor.requires_grad() ? "" : ", frozen") << "\n";
    device = tensor.device();
  }
  whereabouts_->agree(step_, why_agree_);
  wait_for_ranks("agreement", [&] {
    const int64_t number = check_agreement(group_, text.str(), device);
    engine_ = engine_ < 0 ? number : engine_;
    tag_ = first_tag(number);
  });
  if (!is_under_way_) {
    whereabouts_->rest();
  }
  have_agreed_ = true;
}

std::vector<ParameterScale> ParameterSync::scales() {
  pairing_.look();
  ParameterScales newest = saved_scales_;  // which hold until their parameters have been synchronised
  for (const Bucket& bucket : buckets_) {
    newest.record(bucket.ids, bucket.sync->scale());
  }
  return newest.list();
}

void ParameterSync::set_scales(const std::vector<ParameterScale>& scales) {
  saved_scales_ = ParameterScales(scales);
  agree_anew("a state was loaded");
  for (const Bucket& bucket : buckets_) {
    bucket.sync->set_scale(saved_scales_.smallest_of(bucket.ids, bucket.sync->device()));
  }
}

std::vector<ParameterResidual> ParameterSync::residuals() const {
  ParameterResiduals newest = saved_residuals_;
  for (const Bucket& bucket : buckets_) {
    newest.record(bucket.ids, bucket.sync->feedback().residuals());
  }
  return newest.list();
}

void ParameterSync::set_residuals(const std::vector<ParameterResidual>& residuals) {
  saved_residuals_ = ParameterResiduals(residuals);
  for (const Bucket& bucket : buckets_) {
    bucket.sync->feedback().set_residuals(saved_residuals_.take(bucket.ids, bucket.sync->device()));
  }
}

// ---- what it has cost -------------------------------------------------------------------------------------------

at::Tensor ParameterSync::grad_stats() {
  pairing_.look();
  TORCH_CHECK(!buckets_.empty() && num_steps_ > 0,
              "fastsync: no gradients have been synchronised yet; statistics come with a backward()");
  std::vector<at::Tensor> rows;
  for (const Bucket& bucket : buckets_) {
    rows.push_back(bucket.sync->stats().to(buckets_.front().sync->device(), /*non_blocking=*/true));
  }
  return at::stack(rows);
}

SyncTotals ParameterSync::totals() {
  pairing_.look();
  SyncTotals totals = times_.totals();
  totals.all = forgotten_totals_.sum();
  for (const Bucket& bucket : buckets_) {
    totals.buckets.push_back(*bucket.sync->totals());
    totals.all.add(*bucket.sync->totals());
  }
  totals.num_steps = num_steps_;
  return totals;
}

}  // namespace fastsync
