#include "engine/synchronizer.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <set>
#include <thread>

namespace fastsync {

namespace {

// All ranks must send in one order. The buckets of one engine have one; those of two engines whose gradients get ready
// side by side do not. So of the engines in one sequence only the first to be attached sends while backward goes on,
// and at its end all of them follow each other in the order in which they were attached.
struct Attached {
  struct Entry {
    const Synchronizer* engine;
    const void* sequence;  // of those whose calls have to come in one order on all ranks
    std::weak_ptr<Synchronizer> owner;
  };

  std::mutex mutex;  // never held while an engine's is taken, nor while an engine may end
  std::vector<Entry> engines;

  std::vector<std::shared_ptr<Synchronizer>> in_order() {
    const std::lock_guard<std::mutex> lock(mutex);
    std::vector<std::shared_ptr<Synchronizer>> alive;
    for (const Entry& entry : engines) {
      if (auto owner = entry.owner.lock()) {
        alive.push_back(std::move(owner));
      }
    }
    return alive;
  }
};

Attached& attached() {
  static auto& attached = *new Attached();  // outlives every engine
  return attached;
}

// NCCL asks for one order of all groups together: collectives of two groups, begun in different orders on two ranks,
// may wait for each other on the device.
constexpr char kSequenceOfAllGroups = 0;

}  // namespace

Synchronizer::Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                           c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, bool sums)
    : is_on_cpu_(parameters.front().is_cpu()),
      sequence_(is_on_cpu_ ? static_cast<const void*>(group.get()) : &kSequenceOfAllGroups),
      process_id_(getpid()),
      backward_({[this] { return sync_.is_under_way(); }, &finish, &send_leftovers}),
      sync_(parameters, std::move(names), std::move(group), bucket_cap_bytes, sums) {}

Synchronizer::~Synchronizer() {
  if (getpid() == process_id_) {  // in a forked child another thread's locks stay locked
    take_hooks_off();
  }
}

// ---- hooks --------------------------------------------------------------------------------------------------------

void Synchronizer::attach(const std::vector<at::Tensor>& parameters) {
  const auto call = [self = weak_from_this()](auto method) {
    return [self, method](auto... of_gradient) {
      if (const auto engine = self.lock()) {
        std::invoke(method, *engine, of_gradient...);
      }
    };
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_.put_on(parameters, {call(&Synchronizer::before_gradient), call(&Synchronizer::on_gradient),
                               call(&Synchronizer::lose_hooks)});
  }
  const std::lock_guard<std::mutex> lock(attached().mutex);
  attached().engines.push_back({this, sequence_, weak_from_this()});
}

void Synchronizer::before_gradient(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (hooks_.are_on()) {  // and no other thread has detached it
    hooks_.renew(index);
  }
}

// While Python puts a hook on, which nothing here may wait for.
void Synchronizer::lose_hooks(size_t index) { hooks_.lose(index); }

void Synchronizer::take_hooks_off() {
  {
    const std::lock_guard<std::mutex> lock(attached().mutex);
    std::erase_if(attached().engines, [&](const auto& entry) { return entry.engine == this; });
  }
  hooks_.take_off();
}

void Synchronizer::detach() {
  TORCH_CHECK(current_graph_task() == kNoGraphTask, "fastsync: detach() was called inside a backward; call it after");
  if (getpid() == process_id_) {
    wait_for_backward("detach()");
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  take_hooks_off();
}

void Synchronizer::end_interrupted() {
  if (current_graph_task() == kNoGraphTask) {
    abandon_interrupted();
  }
}

// One that has failed may still be let go of by the device's thread when its error has arrived here.
void Synchronizer::wait_for_backward(const char* caller) const {
  constexpr std::chrono::seconds kLimit(1);
  constexpr std::chrono::milliseconds kPause(1);
  const auto deadline = std::chrono::steady_clock::now() + kLimit;
  while (sync_.is_under_way() && !backward_.is_interrupted()) {
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "fastsync: ", caller,
                " was called while another thread's ", "backward is under way; call it after");
    std::this_thread::sleep_for(kPause);
  }
}

void Synchronizer::set_enabled(bool enabled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_enabled_ = enabled;
}

// ---- backward -----------------------------------------------------------------------------------------------------

void Synchronizer::on_gradient(size_t index, bool was_given) {
  if (backward_.is_interrupted()) {
    sync_.check_not_forked();
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  hooks_.restore(index);
  TORCH_CHECK_VALUE(!was_given || !hooks_.are_on() || hooks_.parameter(index).grad().defined(),
                    "fastsync: the gradient of ", sync_.name(index),
                    " was gone as soon as backward had made it, before the ranks could average it. ",
                    "Does an optimizer step inside backward (register_post_accumulate_grad_hook, ",
                    "_apply_optimizer_in_backward)? Ranks would drift apart: step after backward");
  const at::NoGradGuard no_grad;
  Backward::enter({shared_from_this(), &backward_});  // first, for a sync that nobody owns looks interrupted
  if (is_enabled_ && !sync_.is_under_way()) {
    begin();
  }
  if (!is_enabled_) {
    sync_.mark_new(index);
    return;
  }
  sync_.mark_ready(index);
  if (may_send_early()) {
    sync_.send_full_buckets();
  }
}

void Synchronizer::begin() {
  sync_.check_not_forked();
  if (leftover_error_) {
    std::rethrow_exception(std::exchange(leftover_error_, nullptr));
  }
  sync_.begin();
}

// Engines that take part in one backward end together. None waits before all have sent, or ranks on which they come in
// different orders would wait for each other. One that fails keeps neither its own ranks waiting nor those of others.
void Synchronizer::finish(int graph_task) {
  const at::NoGradGuard no_grad;
  const auto engines = attached().in_order();
  std::exception_ptr error;
  std::set<const Synchronizer*> failed;
  const auto of_each = [&](const auto& call) {
    for (const auto& engine : engines) {
      if (engine->backward_.ends_with(graph_task)) {
        const std::lock_guard<std::mutex> lock(engine->mutex_);
        try {
          call(*engine);
        } catch (...) {
          error = error ? error : std::current_exception();
          failed.insert(engine.get());
        }
      }
    }
  };
  of_each([&](Synchronizer& engine) {
    try {
      engine.sync_.send_rest();
    } catch (...) {
      error = error ? error : std::current_exception();
      if (engine.sync_.is_under_way()) {  // else it was refused on all ranks
        engine.sync_.send_poisoned_rest();
      }
      throw;
    }
  });
  of_each([&](Synchronizer& engine) { failed.count(&engine) == 0 ? engine.sync_.receive() : engine.sync_.discard(); });
  if (error) {
    std::rethrow_exception(error);
  }
}

// A backward that raised never calls finish. Of all engines together, because here too the order counts.
template <class Call>
void Synchronizer::of_each_interrupted(const Call& call) {
  const at::NoGradGuard no_grad;
  for (const auto& engine : attached().in_order()) {
    if (getpid() == engine->process_id_ && engine->backward_.is_interrupted()) {
      const std::lock_guard<std::mutex> lock(engine->mutex_);
      if (engine->backward_.is_interrupted()) {  // and no other thread was here first
        call(*engine);
      }
    }
  }
}

// The error is on its way to the user. What fails here is thrown when the engine is used next. On a device the graph
// task may end on another thread, when the user's has gone on: there what is left goes with the next backward.
void Synchronizer::send_leftovers() {
  of_each_interrupted([](Synchronizer& engine) {
    if (!engine.is_on_cpu_) {
      return;
    }
    try {
      if (engine.sync_.rest_waits()) {
        std::cerr << "fastsync: backward failed, and other ranks have yet to agree with this one on what to send. It "
                     "waits for them, until the process group's time-out, before it raises the error\n";
      }
      engine.sync_.send_poisoned_rest();
    } catch (...) {
      if (!engine.sync_.is_under_way()) {  // else it is tried again
        engine.leftover_error_ = std::current_exception();
      }
    }
  });
}

void Synchronizer::abandon_interrupted() {
  of_each_interrupted([](Synchronizer& engine) { engine.sync_.abandon(); });
}

bool Synchronizer::may_send_early() const {
  const std::lock_guard<std::mutex> lock(attached().mutex);
  const auto& engines = attached().engines;
  const auto first =
      std::find_if(engines.begin(), engines.end(), [&](const auto& entry) { return entry.sequence == sequence_; });
  return first != engines.end() && first->engine == this;
}

// ---- between backwards ----------------------------------------------------------------------------------------------

void Synchronizer::synchronize() {
  TORCH_CHECK(current_graph_task() == kNoGraphTask,
              "fastsync: synchronize() was called inside a backward; call it after");
  sync_.check_not_forked();
  wait_for_backward("synchronize()");
  abandon_interrupted();
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto owned = backward_.own();
  begin();
  try {
    sync_.mark_all_ready();
    sync_.send_rest();
  } catch (...) {
    if (sync_.is_under_way()) {  // else it was refused on all ranks
      sync_.abandon();
    }
    throw;
  }
  sync_.receive();
}

}  // namespace fastsync
