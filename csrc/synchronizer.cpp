#include "synchronizer.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace fastsync {

using torch::autograd::variable_list;

// All ranks must send their buckets in one order. Those of one engine have one; two engines whose gradients get ready
// side by side do not. So, of the engines on a process group, only the first to be attached sends while backward goes
// on, and at its end they follow each other in the order in which they were attached.
struct Synchronizer::Lane {
  std::mutex mutex;
  std::vector<Synchronizer*> attached;

  // On all engines together, because here too the order counts.
  void abandon_interrupted() {
    for (Synchronizer* engine : attached) {
      if (engine->was_interrupted()) {
        engine->sync_.abandon();
      }
    }
  }

  void finish() {
    for (Synchronizer* engine : attached) {
      if (engine->sync_.is_under_way()) {
        engine->sync_.send_rest();
      }
    }
    for (Synchronizer* engine : attached) {
      if (engine->sync_.is_under_way()) {
        engine->sync_.receive();
      }
    }
  }
};

std::shared_ptr<Synchronizer::Lane> Synchronizer::lane_of(c10d::ProcessGroup* group) {
  static std::mutex mutex;
  static auto& lanes = *new std::unordered_map<c10d::ProcessGroup*, std::weak_ptr<Lane>>();  // outlives every engine
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(lanes, [](const auto& entry) { return entry.second.expired(); });
  auto lane = lanes[group].lock();
  if (!lane) {
    lane = std::make_shared<Lane>();
    lanes[group] = lane;
  }
  return lane;
}

Synchronizer::Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                           c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes)
    : lane_(lane_of(group.get())),
      sync_(parameters, std::move(names), std::move(group), bucket_cap_bytes),
      process_id_(getpid()) {}

Synchronizer::~Synchronizer() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  take_hooks_off();
}

void Synchronizer::attach(const std::vector<at::Tensor>& parameters) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  for (size_t index = 0; index < parameters.size(); ++index) {
    at::Tensor parameter = parameters[index];
    const bool is_frozen = !parameter.requires_grad();
    if (is_frozen) {
      parameter.set_requires_grad(true);  // only then does it have an accumulator, which stays the one it has
    }
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    if (is_frozen) {
      parameter.set_requires_grad(false);
    }
    const auto on_gradient = [self = weak_from_this(), index](const variable_list& outputs, const variable_list&) {
      if (const auto engine = self.lock()) {
        engine->on_gradient(index);
      }
      return outputs;
    };
    const auto on_compile = [](torch::dynamo::autograd::CompiledNodeArgs&) {
      TORCH_CHECK(false,
                  "fastsync.attach: compiled autograd does not run the hooks that send gradients; use "
                  "attach(overlap=False) and call synchronize() after backward()");
    };
    const auto key =
        accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(on_gradient, on_compile));
    hooks_.push_back({std::move(accumulator), key});
  }
  lane_->attached.push_back(this);
}

void Synchronizer::detach() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  const at::NoGradGuard no_grad;
  lane_->abandon_interrupted();
  take_hooks_off();
}

void Synchronizer::take_hooks_off() {
  for (const Hook& hook : hooks_) {
    hook.accumulator->del_post_hook(hook.key);
  }
  hooks_.clear();
  std::erase(lane_->attached, this);
}

void Synchronizer::set_enabled(bool enabled) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  is_enabled_ = enabled;
}

// ---- backward -----------------------------------------------------------------------------------------------------

void Synchronizer::on_gradient(size_t index) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  if (!is_enabled_) {
    sync_.mark_new(index);
    return;
  }
  const at::NoGradGuard no_grad;
  if (!sync_.is_under_way() || was_interrupted()) {
    begin();
  }
  call_at_the_end_of_backward();
  sync_.mark_ready(index);
  if (lane_->attached.front() == this) {
    sync_.send_full_buckets();
  }
}

void Synchronizer::begin() {
  TORCH_CHECK(getpid() == process_id_, "fastsync: this process was forked from the one that attached the engine, and ",
              "the process group did not come along; call detach() in the child");
  lane_->abandon_interrupted();
  sync_.begin();
}

// A backward that raised never calls on_backward_end.
bool Synchronizer::was_interrupted() const { return sync_.is_under_way() && backward_.expired(); }

// Once for each graph task: a backward that runs inside another's node, as a reentrant checkpoint does, has its own.
void Synchronizer::call_at_the_end_of_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == graph_task_ && !backward_.expired()) {
    return;
  }
  graph_task_ = task;
  auto token = std::make_shared<char>();
  backward_ = token;
  // Strong: the last owner must not die inside one of its hooks.
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), token = std::move(token)] { self->on_backward_end(); });
}

void Synchronizer::on_backward_end() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  if (!sync_.is_under_way() || outer_backward_will_call()) {
    return;
  }
  const at::NoGradGuard no_grad;
  lane_->finish();
}

namespace {

// Calls once, before the node it is put on runs.
struct BeforeNode : torch::autograd::FunctionPreHook {
  explicit BeforeNode(std::function<void()> call) : call(std::move(call)) {}
  variable_list operator()(const variable_list& grads) override {
    if (const auto once = std::exchange(call, nullptr)) {
      once();
    }
    return grads;
  }
  std::function<void()> call;
};

void call_before(torch::autograd::Node& node, std::function<void()> call) {
  auto& hooks = node.pre_hooks();
  // A node that outlives its graph, as the accumulators here do, must not collect them.
  std::erase_if(hooks, [](const auto& hook) {
    const auto* mine = dynamic_cast<const BeforeNode*>(hook.get());
    return mine != nullptr && !mine->call;
  });
  hooks.push_back(std::make_unique<BeforeNode>(std::move(call)));
}

}  // namespace

// At the end of a backward inside another one's node, more gradients may come from the outer one. It goes on with the
// nodes after this: there its own end can be waited for.
bool Synchronizer::outer_backward_will_call() {
  const auto outer = torch::autograd::get_current_node();
  if (!outer) {
    return false;
  }
  auto token = std::make_shared<char>();
  const auto call = [self = weak_from_this(), token] {
    if (const auto engine = self.lock()) {
      const std::lock_guard<std::mutex> lock(engine->lane_->mutex);
      if (engine->sync_.is_under_way()) {
        engine->call_at_the_end_of_backward();
      }
    }
  };
  bool will_call = false;
  for (const auto& edge : outer->next_edges()) {
    if (edge.function) {
      call_before(*edge.function, call);
      will_call = true;
    }
  }
  if (will_call) {
    backward_ = token;
  }
  return will_call;
}

// ---- between backwards ----------------------------------------------------------------------------------------------

void Synchronizer::synchronize() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!sync_.is_under_way() || was_interrupted(), "fastsync: synchronize() was called inside a backward, at ",
              "whose end the gradients are averaged anyway");
  begin();
  sync_.mark_all_ready();
  sync_.send_rest();
  sync_.receive();
}

void Synchronizer::set_wire(const std::string& wire) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  sync_.set_wire(wire_from_name(wire));
}

void Synchronizer::agree() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  sync_.agree();
}

void Synchronizer::ride(const std::string& name, const at::Tensor& value) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  sync_.ride(name, value);
}

std::map<std::string, at::Tensor> Synchronizer::riders() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.riders();
}

at::Tensor Synchronizer::grad_stats() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.grad_stats();
}

SyncTotals Synchronizer::totals() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.totals();
}

int64_t Synchronizer::num_steps() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.num_steps();
}

bool Synchronizer::gradients_are_unchanged() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.gradients_are_unchanged();
}

std::vector<ParameterScale> Synchronizer::scales() {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  return sync_.scales();
}

void Synchronizer::set_scales(const std::vector<ParameterScale>& scales) {
  const std::lock_guard<std::mutex> lock(lane_->mutex);
  sync_.set_scales(scales);
}

}  // namespace fastsync
