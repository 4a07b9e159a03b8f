#include "engine/attached_engines.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "engine/synchronizer.h"

namespace fastsync {

namespace {

// NCCL asks for one order over all groups. If two ranks begin collectives of two groups in different orders, these may
// wait for each other on the device.
constexpr char kSequenceOfAllGroups = 0;

std::vector<const void*> sequences_of(const std::vector<at::Tensor>& parameters, const c10d::ProcessGroup* group) {
  const auto num_on_cpu = std::ranges::count_if(parameters, [](const at::Tensor& each) { return each.is_cpu(); });
  std::vector<const void*> sequences;
  if (num_on_cpu > 0) {
    sequences.push_back(group);
  }
  if (num_on_cpu < std::ssize(parameters)) {
    sequences.push_back(&kSequenceOfAllGroups);
  }
  return sequences;
}

}  // namespace

AttachedEngines& AttachedEngines::all() {
  static auto& all = *new AttachedEngines();  // outlives every engine
  return all;
}

void AttachedEngines::add(Synchronizer& engine, const std::vector<at::Tensor>& parameters) {
  const std::lock_guard<std::mutex> lock(mutex_);
  engines_.push_back({&engine, engine.weak_from_this(), sequences_of(parameters, engine.group().get())});
  note_the_first();
}

void AttachedEngines::remove(const Synchronizer& engine) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(engines_, [&](const Entry& entry) { return entry.engine == &engine; });
  note_the_first();
}

std::vector<std::shared_ptr<Synchronizer>> AttachedEngines::in_order() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Synchronizer>> alive;
  for (const Entry& entry : engines_) {
    if (auto owner = entry.owner.lock()) {
      alive.push_back(std::move(owner));
    }
  }
  return alive;
}

// Tells each engine whether it is the first of its sequences, so that no gradient has to take the lock. An engine that
// has expired may be gone: in a forked child it does not remove itself.
void AttachedEngines::note_the_first() {
  std::set<const void*> seen;
  for (const Entry& entry : engines_) {
    if (!entry.owner.expired()) {
      bool is_first = true;
      for (const void* const sequence : entry.sequences) {
        is_first &= seen.insert(sequence).second;
      }
      entry.engine->set_first(is_first);
    }
  }
}

}  // namespace fastsync
