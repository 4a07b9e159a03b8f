#include "ddp_hook.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>

#include "agreement.h"

namespace fastsync {

using c10::ivalue::Future;

namespace {

void check_buffer(const at::Tensor& buffer, Wire wire, const std::string& name) {
  TORCH_CHECK_VALUE(buffer.layout() == at::kStrided, "fastsync: ", name,
                    " holds a sparse gradient, which fastsync does ",
                    "not handle; use sparse=False in the embedding, or DDP without a fastsync hook");
  const auto dtype = buffer.scalar_type();
  const bool plain_complex = buffer.is_complex() && is_supported(c10::toRealValueType(dtype));
  TORCH_CHECK_VALUE(!plain_complex || wire == Wire::kNone, "fastsync: ", name, " holds ", dtype, " gradients, which ",
                    "cannot travel as ", name_of(wire), "; use compression='none'");
  TORCH_CHECK_VALUE(plain_complex || is_supported(dtype), "fastsync: ", name, " holds ", dtype,
                    " gradients; fastsync handles float32, float64, float16, bfloat16 and complex ones");
}

std::string describe(const c10d::GradBucket& bucket, const std::string& name, Wire wire,
                     const std::string& loaded_scales) {
  std::ostringstream text;
  text << "compression " << name_of(wire) << "\n" << loaded_scales << "\n";
  text << name << " with " << bucket.getBuffer().numel() << " elements of " << bucket.getBuffer().scalar_type() << "\n";
  const auto parameters = bucket.getParameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    text << "parameter " << i << " of " << name << " of shape " << parameters[i].sizes() << "\n";
  }
  return text.str();
}

}  // namespace

HookState::HookState(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

void HookState::set_wire(Wire wire) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wire_ = wire;
  for (const auto& [storage, bucket] : buckets_) {
    bucket->agreed_wire.reset();
  }
}

c10::intrusive_ptr<Future> HookState::run(c10d::GradBucket& grad_bucket, Wire wire) {
  const at::Tensor buffer = grad_bucket.getBuffer();
  check_buffer(buffer, wire, "bucket " + std::to_string(grad_bucket.getIndex()));
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<Bucket> bucket = find_or_add(grad_bucket);
  // The first bucket may never come: with skip_all_reduce_unused_params DDP passes over those that nobody uses.
  const bool came_already = std::find(step_.begin(), step_.end(), bucket) != step_.end();
  if (grad_bucket.getIndex() == 0 || step_.empty() || came_already) {
    step_.clear();
    times_.begin_step();
    num_steps_ += 1;
  }
  if (bucket->agreed_wire != wire) {
    agree(*bucket, grad_bucket, wire);
  }
  step_.push_back(bucket);
  const bool inherits = wire == Wire::kFloat16 && !bucket->sync->scale().defined();
  if (inherits) {
    bucket->sync->set_scale(inherited_scale(*bucket));
  }
  const auto dense = buffer.is_complex() ? at::view_as_real(buffer).view({-1}) : buffer.view({-1});
  auto future = bucket->sync->sync({dense}, wire, times_.start_bucket(bucket->sync->totals(), buffer.device()));
  if (inherits) {
    share_scale(*bucket);
  }
  if (grad_bucket.isLast()) {
    times_.end_step();
  }
  if (!buffer.is_complex()) {
    return future;
  }
  return future->then(
      [buffer](Future& averaged) {
        averaged.value();  // throws what went wrong
        return c10::IValue(buffer);
      },
      c10::TensorType::get());
}

// A bucket is what is in it. DDP keeps a bucket's buffer from step to step, which finds it at once; hooks wrapped
// around ours hand over a buffer of their own each time, and then the parameters tell.
std::shared_ptr<HookState::Bucket> HookState::find_or_add(c10d::GradBucket& grad_bucket) {
  const auto& storage = grad_bucket.getBuffer().storage();
  const auto* key = storage.unsafeGetStorageImpl();
  if (const auto found = buckets_.find(key); found != buckets_.end() && !found->second->storage.expired()) {
    return found->second;
  }
  const auto parameters = grad_bucket.getParameters();
  std::shared_ptr<Bucket> bucket = take_by_parameters(parameters);
  if (bucket == nullptr) {
    const std::string name = "bucket " + std::to_string(grad_bucket.getIndex());
    auto sync = std::make_shared<BucketSync>(group_, name, grad_bucket.getBuffer().device());
    all_totals_.push_back(sync->totals());
    bucket = std::make_shared<Bucket>(Bucket{storage.getWeakStorageImpl(), {}, std::move(sync), std::nullopt});
    for (const at::Tensor& parameter : parameters) {
      bucket->parameters.emplace_back(parameter.getIntrusivePtr());
    }
  }
  bucket->storage = storage.getWeakStorageImpl();
  forget_dead_buckets();
  buckets_[key] = bucket;
  return bucket;
}

// The bucket of exactly these parameters, taken out of the table: its buffer is another one now.
std::shared_ptr<HookState::Bucket> HookState::take_by_parameters(const std::vector<at::Tensor>& parameters) {
  const auto same = [](const ParameterId& id, const at::Tensor& parameter) {
    return !id.expired() && id._unsafe_get_target() == parameter.unsafeGetTensorImpl();
  };
  for (auto entry = buckets_.begin(); entry != buckets_.end(); ++entry) {
    const auto& ids = entry->second->parameters;
    if (std::equal(ids.begin(), ids.end(), parameters.begin(), parameters.end(), same)) {
      auto bucket = std::move(entry->second);
      buckets_.erase(entry);
      return bucket;
    }
  }
  return nullptr;
}

void HookState::forget_dead_buckets() {
  std::erase_if(buckets_, [](const auto& entry) {
    return std::any_of(entry.second->parameters.begin(), entry.second->parameters.end(),
                       [](const ParameterId& id) { return id.expired(); });
  });
  std::erase_if(known_scales_, [](const auto& entry) { return entry.second.parameter.expired(); });
}

void HookState::agree(Bucket& bucket, c10d::GradBucket& grad_bucket, Wire wire) {
  const auto name = "bucket " + std::to_string(grad_bucket.getIndex());
  try {
    check_agreement(group_, describe(grad_bucket, name, wire, loaded_scales_), grad_bucket.getBuffer().device());
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "fastsync: agreement on ", name, " failed on rank ", group_->getRank(), " of ",
                group_->getSize(), ": ", error.what());
  }
  bucket.agreed_wire = wire;
}

// DDP regroups its buckets after the first backward, and a resumed run starts from saved scales: a new bucket takes the
// smallest scale of its parameters, so that none saturates. Undefined where one is unknown, on all ranks alike.
at::Tensor HookState::inherited_scale(const Bucket& bucket) const {
  std::vector<at::Tensor> scales;
  for (const ParameterId& id : bucket.parameters) {
    const auto known = known_scales_.find(id._unsafe_get_target());
    if (known == known_scales_.end()) {
      return {};
    }
    if (scales.empty() || !scales.back().is_same(known->second.scale)) {
      scales.push_back(known->second.scale.to(bucket.sync->stats().device()));
    }
  }
  return std::get<0>(at::cat(scales).min(0, /*keepdim=*/true));
}

void HookState::share_scale(const Bucket& bucket) {
  for (const ParameterId& id : bucket.parameters) {
    known_scales_.insert_or_assign(id._unsafe_get_target(), KnownScale{id, bucket.sync->scale()});
  }
}

at::Tensor HookState::grad_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!step_.empty(), "fastsync: no gradients have been synchronised yet; statistics come with a backward()");
  std::vector<at::Tensor> rows;
  for (const auto& bucket : step_) {
    rows.push_back(bucket->sync->stats().to(step_.front()->sync->stats().device(), /*non_blocking=*/true));
  }
  return at::stack(rows);
}

HookState::Totals HookState::totals() {
  const std::lock_guard<std::mutex> lock(mutex_);
  times_.collect();
  Totals totals;
  for (const auto& bucket : step_) {
    totals.buckets.push_back(*bucket->sync->totals());
  }
  for (const auto& bucket_totals : all_totals_) {
    totals.all.add(*bucket_totals);
  }
  totals.num_steps = num_steps_;
  totals.num_timed_steps = times_.num_timed_steps();
  totals.exposed_time = times_.exposed_time();
  return totals;
}

std::vector<HookState::ParameterScale> HookState::scales() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ParameterScale> scales;
  for (const auto& [impl, known] : known_scales_) {
    if (auto parameter = known.parameter.lock()) {
      scales.emplace_back(at::Tensor(std::move(parameter)), known.scale.item<double>());
    }
  }
  return scales;
}

void HookState::set_scales(const std::vector<ParameterScale>& scales) {
  const std::lock_guard<std::mutex> lock(mutex_);
  known_scales_.clear();
  std::ostringstream values;
  for (const auto& [parameter, scale] : scales) {
    const auto tensor = at::full({1}, scale, at::TensorOptions().dtype(at::kFloat).device(parameter.device()));
    known_scales_.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                   KnownScale{ParameterId(parameter.getIntrusivePtr()), tensor});
    values << scale << " ";
  }
  loaded_scales_ = "saved scales of " + std::to_string(scales.size()) + " parameters, fingerprint " +
                   std::to_string(fingerprint(values.str()));
  for (const auto& [storage, bucket] : buckets_) {
    bucket->sync->set_scale({});
    bucket->agreed_wire.reset();
  }
}

namespace {

class Hook : public c10d::CppCommHookInterface<std::shared_ptr<HookState>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<Future> runHook(c10d::GradBucket& bucket) override { return state_->run(bucket, state_->wire()); }
};

}  // namespace

void register_hook(c10d::Reducer& reducer, std::shared_ptr<HookState> state) {
  reducer.register_comm_hook(std::make_unique<Hook>(std::move(state)));
}

}  // namespace fastsync
