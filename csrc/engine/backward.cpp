#include "engine/backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <iostream>
#include <map>
#include <utility>

namespace fastsync {

using torch::autograd::variable_list;

namespace {

// Makes one call before its node runs.
struct CallBeforeNode : torch::autograd::FunctionPreHook {
  explicit CallBeforeNode(std::function<void()> call) : call(std::move(call)) {}
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
  // An accumulator may outlive many graphs, and must not collect hooks that have made their call.
  std::erase_if(hooks, [](const auto& hook) {
    const auto* const ours = dynamic_cast<const CallBeforeNode*>(hook.get());
    return ours != nullptr && !ours->call;
  });
  hooks.push_back(std::make_unique<CallBeforeNode>(std::move(call)));
}

}  // namespace

int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// Notices whether a graph task has ended or failed. The callbacks at the task's end keep it alive. All engines that
// have entered the task share it.
struct Backward::GraphTask {
  explicit GraphTask(void (*on_failure)()) : on_failure(on_failure) {}

  // If the graph task has failed, this runs as soon as its backward raises.
  ~GraphTask() {
    try {
      if (!has_ended) {
        fail();
      }
    } catch (const std::exception& error) {  // backward's own error is on its way
      std::cerr << "fastsync: what follows on a backward that failed went wrong: " << error.what() << "\n";
    }
  }

  // Calls on_failure. If there is an outer backward, that one does so when it ends.
  void fail() const {
    if (const int outer = current_graph_task(); outer != kNoGraphTask) {
      torch::autograd::Engine::get_default_engine().queue_callback([task = of(outer, on_failure)] {});
    } else {
      on_failure();
    }
  }

  static std::shared_ptr<GraphTask> of(int id, void (*on_failure)()) {
    static std::mutex mutex;
    static auto& by_id = *new std::map<int, std::weak_ptr<GraphTask>>();
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(by_id, [](const auto& entry) { return entry.second.expired(); });
    auto task = by_id[id].lock();
    if (!task) {
      task = std::make_shared<GraphTask>(on_failure);
      by_id[id] = task;
    }
    return task;
  }

  void (*const on_failure)();
  bool has_ended = false;
};

void Backward::enter(const std::shared_ptr<Backward>& self) {
  if (self->is_entered()) {
    return;
  }
  const int id = current_graph_task();
  const auto task = GraphTask::of(id, self->on_failure_);
  // The callback keeps the engine, so that its last owner does not go away inside one of its hooks.
  torch::autograd::Engine::get_default_engine().queue_callback([self, id, task] {
    task->has_ended = true;
    if (self->ends_with(id) && !hand_to_outer(self)) {
      self->on_end_(id);
    }
  });
  self->set_owner(task, id);
}

std::shared_ptr<void> Backward::own() {
  const auto caller = std::make_shared<char>();
  set_owner(caller, kNoGraphTask);
  return caller;
}

// Makes the outer graph task the owner, when the graph task that owns the sync has ended. Returns false if there is no
// outer one.
bool Backward::hand_to_outer(const std::shared_ptr<Backward>& self) {
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return false;
  }
  const auto enter_outer = [weak = std::weak_ptr(self)] {
    if (const auto backward = weak.lock(); backward && backward->is_under_way_()) {
      enter(backward);
    }
  };
  bool has_next = false;
  for (const auto& edge : node->next_edges()) {
    if (edge.function) {
      call_before(*edge.function, enter_outer);
      has_next = true;
    }
  }
  if (has_next) {
    // A hook on this node keeps the owner for as long as the node's graph lives. A hook on a next node might keep it
    // longer, because that may be an accumulator.
    const auto owner = std::make_shared<char>();
    self->set_owner(owner, kNoGraphTask);
    call_before(*node, [owner] {});
  }
  return has_next;
}

bool Backward::is_interrupted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_under_way_() && owner_.expired();
}

bool Backward::ends_with(int graph_task) const { return is_under_way_() && is_owned_by(graph_task); }

bool Backward::is_owned_by(int graph_task) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return owner_graph_task_ == graph_task && !owner_.expired();
}

void Backward::set_owner(const std::shared_ptr<void>& owner, int graph_task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  owner_ = owner;
  owner_graph_task_ = graph_task;
}

}  // namespace fastsync
