#include "engine/synchronizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace fastsync {

namespace {

// NCCL asks for one order over all groups. If two ranks begin collectives of two groups in different orders, these may
// wait for each other on the device.
constexpr char kSequenceOfAllGroups = 0;

constexpr auto kInChild = "call detach() in the child";

std::vector<const void*> sequences_of(const std::vector<at::Tensor>& parameters,
                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto num_on_cpu = std::ranges::count_if(parameters, [](const at::Tensor& each) { return each.is_cpu(); });
  std::vector<const void*> sequences;
  if (num_on_cpu > 0) {
    sequences.push_back(group.get());
  }
  if (num_on_cpu < std::ssize(parameters)) {
    sequences.push_back(&kSequenceOfAllGroups);
  }
  return sequences;
}

void check_outside_backward(const char* caller) {
  TORCH_CHECK(current_graph_task() == kNoGraphTask, "fastsync: ", caller,
              " was called inside a backward; call it after");
}

}  // namespace

// Note [Order of engines]
// All ranks must send in one order. The buckets of one engine have an order. The buckets of two engines have none if
// their gradients get ready side by side. So only the first engine of a sequence sends while backward goes on. At the
// end of backward the others follow, in the order in which they were attached. The engines of a group are a sequence
// for their parameters on the CPU. All engines are one for parameters on devices. An engine with both is in both.
class Synchronizer::Attached {
 public:
  static Attached& all() {
    static auto& all = *new Attached();  // outlives every engine
    return all;
  }

  void add(Synchronizer& engine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    engines_.push_back({&engine, engine.weak_from_this()});
    note_the_first();
  }

  void remove(const Synchronizer& engine) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(engines_, [&](const Entry& entry) { return entry.engine == &engine; });
    note_the_first();
  }

  std::vector<std::shared_ptr<Synchronizer>> in_order() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Synchronizer>> alive;
    for (const Entry& entry : engines_) {
      if (auto owner = entry.owner.lock()) {
        alive.push_back(std::move(owner));
      }
    }
    return alive;
  }

 private:
  struct Entry {
    Synchronizer* engine;
    std::weak_ptr<Synchronizer> owner;
  };

  // Tells each engine whether it is the first of its sequences, so that no gradient has to take the lock. An engine
  // that has expired may be gone: in a forked child it does not remove itself.
  void note_the_first() {
    std::set<const void*> seen;
    for (const Entry& entry : engines_) {
      if (!entry.owner.expired()) {
        bool is_first = true;
        for (const void* const sequence : entry.engine->sequences_) {
          is_first &= seen.insert(sequence).second;
        }
        entry.engine->is_first_ = is_first;
      }
    }
  }

  std::mutex mutex_;  // never held while an engine's mutex is taken, nor while an engine may end
  std::vector<Entry> engines_;
};

Synchronizer::Synchronizer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                           c10::intrusive_ptr<c10d::ProcessGroup> group, int64_t bucket_cap_bytes, Op op,
                           const std::set<std::string>& sparse)
    : EngineState(group, "the engine of parameter " + names.front(), "with sync.join():"),
      sync_(*this, parameters, std::move(names), bucket_cap_bytes, op, sparse),
      is_on_cpu_(std::ranges::all_of(parameters, [](const at::Tensor& parameter) { return parameter.is_cpu(); })),
      sequences_(sequences_of(parameters, group)),
      backward_([this] { return sync_.is_under_way(); }, &finish, &send_leftovers) {}

Synchronizer::~Synchronizer() {
  if (!is_forked()) {  // in a forked child another thread's locks stay locked
    take_hooks_off();
  }
}

void Synchronizer::attach(const std::vector<at::Tensor>& parameters, bool overlap) {
  overlaps_ = overlap;
  if (!overlap && !sync_.sums()) {
    return;  // hooks would have nothing to tell
  }
  for (size_t index = 0; index < parameters.size(); ++index) {
    GradientHook::Calls calls;
    if (sync_.sums()) {
      calls.before = [weak = weak_from_this(), index] {
        if (const auto self = weak.lock()) {
          self->before_gradient(index);
        }
      };
    }
    calls.after = [weak = weak_from_this(), index](const at::Tensor& parameter, bool is_gone) {
      if (const auto self = weak.lock()) {
        self->on_gradient(index, parameter, is_gone);
      }
    };
    calls.must_run = overlap;
    hooks_.push_back(GradientHook::put_on(parameters[index], std::move(calls)));
  }
  if (!overlap) {
    return;
  }
  Attached::all().add(*this);
}

void Synchronizer::take_hooks_off() {
  Attached::all().remove(*this);
  hooks_.clear();
}

void Synchronizer::detach() {
  check_outside_backward("detach()");
  if (!is_forked()) {
    wait_for_backward("detach()");
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  take_hooks_off();
  overlaps_ = false;
  const at::NoGradGuard no_grad;
  sync_.put_sums_back(/*only_lone_ones=*/false);
}

void Synchronizer::end_interrupted() {
  if (current_graph_task() == kNoGraphTask) {
    abandon_interrupted();
  }
}

// When the error of a backward has arrived here, a device's thread may still keep that backward alive for a moment.
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

// ---- backward -----------------------------------------------------------------------------------------------------

void Synchronizer::before_gradient(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  sync_.parameters()[index].put_sum_aside();
}

void Synchronizer::on_gradient(size_t index, const at::Tensor& tensor, bool is_gone) {
  const bool is_entered = backward_.is_entered();
  if (!is_entered && backward_.is_interrupted()) {
    check_not_forked(kInChild);
    abandon_interrupted();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  Parameter& parameter = sync_.parameters()[index];
  parameter.note_gradient(tensor);
  if (!overlaps_) {
    return;
  }
  TORCH_CHECK_VALUE(!is_gone, "fastsync: the gradient of ", parameter.name,
                    " was gone as soon as backward had made it, before the ranks could average it. ",
                    "Does an optimizer step inside backward (register_post_accumulate_grad_hook, ",
                    "_apply_optimizer_in_backward)? Ranks would drift apart: step after backward");
  if (!is_entered) {
    Backward::enter({shared_from_this(), &backward_});  // first, for a step that nobody owns looks interrupted
  }
  if (!is_enabled_) {
    parameter.mark_new(/*left_over=*/true);
    return;
  }
  if (!sync_.is_under_way()) {
    check_not_forked(kInChild);
    sync_.begin();
  }
  sync_.mark_ready(index);
  if (is_first_) {
    sync_.send_full_buckets();
  }
}

// Engines that take part in one backward end together. No engine waits before all have sent. Otherwise ranks on which
// engines come in different orders would wait for each other. If an engine fails, no rank is kept waiting by any
// engine.
void Synchronizer::finish(int graph_task) {
  const at::NoGradGuard no_grad;
  const auto engines = Attached::all().in_order();
  std::exception_ptr error;
  const auto for_each = [&](const auto& call) {
    for (const auto& engine : engines) {
      if (engine->backward_.ends_with(graph_task)) {
        const std::lock_guard<std::mutex> lock(engine->mutex_);
        try {
          call(*engine);
        } catch (...) {
          error = error ? error : std::current_exception();
        }
      }
    }
  };
  for_each([&](Synchronizer& engine) {
    try {
      engine.sync_.send_rest();
    } catch (...) {
      error = error ? error : std::current_exception();
      if (engine.sync_.is_under_way()) {  // else it was refused on all ranks
        engine.sync_.fail_and_send_rest();
      }
    }
  });
  for_each([](Synchronizer& engine) { engine.sync_.receive(); });
  if (error) {
    std::rethrow_exception(error);
  }
}

// A backward that raised never calls finish. This makes the call with all interrupted engines, because the order counts
// here, too.
void Synchronizer::for_each_interrupted(const std::function<void(Synchronizer&)>& call) {
  const at::NoGradGuard no_grad;
  for (const auto& engine : Attached::all().in_order()) {
    if (!engine->is_forked() && engine->backward_.is_interrupted()) {
      const std::lock_guard<std::mutex> lock(engine->mutex_);
      if (engine->backward_.is_interrupted()) {  // no other thread has ended it first
        call(*engine);
      }
    }
  }
}

// Sends what is left while backward's error is on its way to the user. With a device the graph task may end on another
// thread, when the user's thread has gone on. Then the next backward sends what is left.
void Synchronizer::send_leftovers() {
  for_each_interrupted([](Synchronizer& engine) {
    try {
      if (engine.is_on_cpu_) {
        engine.sync_.put_sums_back(/*only_lone_ones=*/true);
        engine.sync_.fail_and_send_rest();
      } else {
        engine.sync_.join_streams();
      }
    } catch (...) {
      // The next sync tries again, or is refused on all ranks, as this one was.
    }
  });
}

void Synchronizer::abandon_interrupted() {
  for_each_interrupted([](Synchronizer& engine) { engine.sync_.abandon(); });
}

// ---- between backwards ----------------------------------------------------------------------------------------------

// Makes sure that no backward is under way, and ends the step of one that has failed. The caller's name is for errors.
void Synchronizer::end_backwards(const char* caller) {
  check_outside_backward(caller);
  check_not_forked(kInChild);
  wait_for_backward(caller);
  abandon_interrupted();
}

void Synchronizer::abandon_step() { end_backwards("abandon_step()"); }

void Synchronizer::synchronize() {
  end_backwards("synchronize()");
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto owned = backward_.own();
  sync_.begin();
  try {
    sync_.mark_all_ready();
    sync_.send_rest();
  } catch (...) {
    if (sync_.is_under_way()) {  // else it was refused on all ranks
      try {
        sync_.abandon();
      } catch (const std::exception&) {  // the first error tells why
      }
    }
    throw;
  }
  sync_.receive();
}

}  // namespace fastsync
