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
  // A node that outlives its graph must not collect them.
  std::erase_if(hooks, [](const auto& hook) {
    const auto* mine = dynamic_cast<const BeforeNode*>(hook.get());
    return mine != nullptr && !mine->call;
  });
  hooks.push_back(std::make_unique<BeforeNode>(std::move(call)));
}

}  // namespace

int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }

// A graph task's, held by what is to be called at its end. One that fails lets go of those calls without making them,
// when backward raises: before anything else this thread does. Inside another backward that one's end is waited for.
struct Backward::Token {
  explicit Token(void (*give_up)()) : give_up(give_up) {}

  ~Token() {
    try {
      if (!has_ended) {
        fail();
      }
    } catch (const std::exception& error) {  // backward's own is on its way
      std::cerr << "fastsync: what follows on a backward that failed went wrong: " << error.what() << "\n";
    }
  }

  void fail() const {
    if (const int outer = current_graph_task(); outer != kNoGraphTask) {
      torch::autograd::Engine::get_default_engine().queue_callback([token = of(outer, give_up)] {});
    } else {
      give_up();
    }
  }

  static std::shared_ptr<Token> of(int graph_task, void (*give_up)()) {
    static std::mutex mutex;
    static auto& of_task = *new std::map<int, std::weak_ptr<Token>>();
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(of_task, [](const auto& entry) { return entry.second.expired(); });
    auto token = of_task[graph_task].lock();
    if (!token) {
      token = std::make_shared<Token>(give_up);
      of_task[graph_task] = token;
    }
    return token;
  }

  void (*const give_up)();
  bool has_ended = false;
};

void Backward::enter(const std::shared_ptr<Backward>& self) {
  const int graph_task = current_graph_task();
  if (auto token = self->new_token(graph_task)) {
    // Strong, so that the last owner does not die inside one of its hooks.
    torch::autograd::Engine::get_default_engine().queue_callback([self, graph_task, token = std::move(token)] {
      token->has_ended = true;
      if (self->ends_with(graph_task) && !outer_will_end(self)) {
        self->end_(graph_task);
      }
    });
  }
}

// Null where it belongs to that graph task already.
std::shared_ptr<Backward::Token> Backward::new_token(int graph_task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (graph_task == graph_task_ && !owner_.expired()) {
    return nullptr;
  }
  graph_task_ = graph_task;
  auto token = Token::of(graph_task, give_up_);
  owner_ = token;
  return token;
}

std::shared_ptr<void> Backward::own() {
  const std::lock_guard<std::mutex> lock(mutex_);
  graph_task_ = kNoGraphTask;
  auto token = std::make_shared<char>();
  owner_ = token;
  return token;
}

// At the end of a backward inside another one's node, more gradients may come from the outer one. It goes on with the
// nodes after this: there its own end can be waited for.
bool Backward::outer_will_end(const std::shared_ptr<Backward>& self) {
  const auto outer = torch::autograd::get_current_node();
  if (!outer) {
    return false;
  }
  const auto enter_outer = [weak = std::weak_ptr(self)] {
    if (const auto backward = weak.lock(); backward && backward->is_under_way_()) {
      enter(backward);
    }
  };
  bool will_call = false;
  for (const auto& edge : outer->next_edges()) {
    if (edge.function) {
      call_before(*edge.function, enter_outer);
      will_call = true;
    }
  }
  if (will_call) {
    // The outer node holds the token, for it lives as long as its graph; a next one may be an accumulator.
    auto token = std::make_shared<char>();
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->owner_ = token;
    call_before(*outer, [token = std::move(token)] {});
  }
  return will_call;
}

bool Backward::is_interrupted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_under_way_() && owner_.expired();
}

bool Backward::ends_with(int graph_task) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_under_way_() && graph_task_ == graph_task;
}

}  // namespace fastsync
