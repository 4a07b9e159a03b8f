#include "engine/parameter_gather.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>

#include <utility>

#include "passes/backend.h"
#include "passes/cuda_graphs.h"
#include "sums/plan.h"
#include "transport/without_python_objects.h"

namespace fastsync {

// ---- a gather under way ---------------------------------------------------------------------------------------------

// Ranks of one host share the rows. In shared memory the team itself tells modules apart.
std::unique_ptr<SumWork> GatherMemory::make_work(FlatGradients values, int first_tag, int64_t module) {
  const bool is_on_one_host = teams.hosts().num_nodes == 1;
  const auto key = [&] {
    const bool shares_memory = is_on_one_host && teams.can_share();
    return PlanKey{.algorithm = Algorithm::kAllGather,
                   .shares_memory = shares_memory,
                   .region_bytes = teams.shared() ? teams.shared()->region_bytes() : 0,
                   .tag = shares_memory ? 0 : first_tag + static_cast<int>(module),
                   .grad_dtype = values.grad_dtype,
                   .wire_dtype = values.wire_dtype,
                   .num_values = values.num_values / teams.all()->size()};
  };
  if (is_on_one_host && !teams.has_room(make_plan(key(), teams).bytes)) {
    buffer.reset();
    teams.make_room(make_plan(key(), teams).bytes);
  }
  const auto plan = std::make_shared<const Plan>(make_plan(key(), teams));
  SumMemory memory{plan, key(), gathers_in_place(key()) ? values.grads.front() : buffer};
  if (!memory.buffer.defined() || memory.buffer.numel() < plan->bytes) {
    const c10::InferenceMode for_any_mode(false);
    memory.buffer = plan->shared ? plan->shared->allocate(plan->bytes)
                                 : new_buffer(*teams.all()->group(), plan->bytes, teams.all()->device());
  }
  if (values.device.is_cpu() && !gathers_in_place(key())) {  // a device's allocator keeps memory by itself
    buffer = memory.buffer;
  }
  return std::make_unique<PlannedSum>(std::move(values), memory, SumNumber{.id = module});
}

void GatherWork::wait() {
  if (!memory_) {
    return;
  }
  const WithoutPythonObjects without_python;
  engine_->liveness().note_gathering(step_);
  const auto in_any_case = c10::make_scope_exit([this] { let_go(); });
  engine_->wait_for_ranks("gathering " + module_->name,
                          [this] { work_->receive([this] { stopwatch_->mark(Mark::kReduced); }); });
  is_received_ = true;
  module_->totals->wire_bytes += work_->sent_bytes();
  stopwatch_->mark(Mark::kDone);
  engine_->liveness().note_rest();
}

// Messages that nobody has waited for may still arrive, and keep the buffer that they arrive in.
void GatherWork::let_go() {
  if (!memory_) {
    return;
  }
  if (work_) {
    SumWork::abandon(std::move(work_));
  }
  if (!is_received_ && !memory_->teams.shared()) {
    memory_->buffer.reset();
  }
  memory_->is_in_use.store(false, std::memory_order_release);
  memory_.reset();
}

// ---- the engine -----------------------------------------------------------------------------------------------------

ParameterGather::ParameterGather(c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<std::string> names,
                                 const std::string& what)
    : EngineState(std::move(group), what), agreement_(*group_, what) {
  for (std::string& name : names) {
    modules_.push_back({std::move(name)});
  }
}

std::shared_ptr<GatherWork> ParameterGather::all_gather(size_t index, const at::Tensor& output,
                                                        const std::vector<int64_t>& numels) {
  check_not_forked("shard the model in the process that trains");
  const WithoutPythonObjects without_python;
  const std::lock_guard<std::mutex> lock(mutex_);
  GatheredModule& module = modules_.at(index);
  auto work = std::make_shared<GatherWork>();
  if (output.numel() == 0) {
    return work;
  }
  begin_step();
  work->step_ = take_number();
  if (!have_agreed(agreement_, compressions_)) {
    agree(agreement_, "agreement on the all-gathers", compressions_, work->step_, /*lines=*/"", output.device());
  }
  pass_agreement(agreement_, work->step_);
  FlatGradients values = flatten(module, output, numels);
  work->engine_ = shared_from_this();
  work->module_ = &module;
  work->memory_ = free_memory(output.device());
  BucketTotals& totals = *module.totals;
  work->stopwatch_ = buckets_.times().start_bucket(module.totals, output.device());
  work->stopwatch_->mark(Mark::kStart);
  liveness_->note_gathering(work->step_);
  wait_for_ranks("gathering " + module.name, [&] {
    work->work_ =
        work->memory_->make_work(std::move(values), first_tag(agreement_.number), static_cast<int64_t>(index));
    work->work_->send();
  });
  work->stopwatch_->mark(Mark::kSent);
  const Teams& teams = work->memory_->teams;
  totals.numel = output.numel();
  totals.num_syncs += 1;
  totals.kernels = kernels_on(output.device().type());
  totals.shares_memory = teams.shared() != nullptr;
  totals.why_not_shared =
      teams.num_hosts() > 1 ? c10::str("its ranks are on ", teams.num_hosts(), " hosts") : teams.why_not_shared();
  return work;
}

// Values that travel as they are may have any dtype.
FlatGradients ParameterGather::flatten(GatheredModule& module, const at::Tensor& output,
                                       const std::vector<int64_t>& numels) const {
  const at::ScalarType dtype = output.scalar_type();
  const std::optional<DType> wire = compressions_->at(output.numel()).wire;
  TORCH_CHECK_VALUE(!wire || is_supported(dtype), "compression: ", module.name, " has parameters of ", dtype,
                    dtype == at::kByte ? ", or of several dtypes" : "", ", and only float32, float64, float16 and ",
                    "bfloat16 travel in fewer bits; call fully_shard for the others, and register_fsdp with ",
                    "parameters='none' for them");
  if (!wire || *wire == dtype_of(dtype)) {
    return FlatGradients(output.view(at::kByte));
  }
  if (!module.workspace) {
    module.workspace = std::make_shared<Workspace>(output.device());
    module.stats = at::zeros({kNumStats}, at::TensorOptions().dtype(at::kDouble).device(output.device()));
  }
  if (is_capturing(output.device())) {  // asked first, because the list costs more
    hold_for_graph(output.device(), {module.stats, module.workspace->totals()});
  }
  std::vector<int64_t> of_all_ranks;
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    of_all_ranks.insert(of_all_ranks.end(), numels.begin(), numels.end());
  }
  FlatGradients values(output.split_with_sizes(of_all_ranks), *wire, output.device());
  values.stats = module.stats;
  values.workspace = module.workspace;
  return values;
}

// At least two take turns, so that a rank fills one while others still read the one before.
std::shared_ptr<GatherMemory> ParameterGather::free_memory(c10::Device device) {
  for (size_t i = 1; i <= memories_.size() && memories_.size() >= 2; ++i) {
    const size_t index = (newest_memory_ + i) % memories_.size();
    if (!memories_[index]->is_in_use.load(std::memory_order_acquire)) {
      newest_memory_ = index;
      memories_[index]->is_in_use = true;
      return memories_[index];
    }
  }
  newest_memory_ = memories_.size();
  return memories_.emplace_back(std::make_shared<GatherMemory>(group_, device));
}

std::vector<BucketTotals> ParameterGather::totals() {
  buckets_.times().end_step();
  buckets_.times().collect();
  std::vector<BucketTotals> totals;
  for (const GatheredModule& module : modules_) {
    totals.push_back(*module.totals);
  }
  return totals;
}

void ParameterGather::give_up() const {
  for (const auto& memory : memories_) {
    memory->teams.give_up();
  }
}

}  // namespace fastsync
