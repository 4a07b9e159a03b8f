// The engines that send while backward goes on, in the order in which they were attached.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <vector>

namespace fastsync {

class Synchronizer;

// Note [Order of engines]
// All ranks must send in one order. The buckets of one engine have an order. The buckets of two engines have none if
// their gradients get ready side by side. So only the first engine of a sequence sends while backward goes on. At the
// end of backward the others follow, in the order in which they were attached. The engines of a group are a sequence
// for their parameters on the CPU. All engines are one for parameters on devices. An engine with both is in both.

// Thread-safe.
class AttachedEngines {
 public:
  static AttachedEngines& all();

  void add(Synchronizer& engine, const std::vector<at::Tensor>& parameters);
  void remove(const Synchronizer& engine);
  std::vector<std::shared_ptr<Synchronizer>> in_order();

 private:
  struct Entry {
    Synchronizer* engine;
    std::weak_ptr<Synchronizer> owner;
    std::vector<const void*> sequences;  // engines of one must call in the same order on all ranks
  };

  void note_the_first();

  std::mutex mutex_;  // never held while an engine's mutex is taken, nor while an engine may end
  std::vector<Entry> engines_;
};

}  // namespace fastsync
