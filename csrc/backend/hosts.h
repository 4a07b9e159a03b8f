// The ranks of a group, on one host or on several. Those of a host meet in its memory. The first ranks of the hosts
// meet over Gloo, so only what a host has in all crosses.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/collectives.h"
#include "backend/reductions.h"
#include "backend/rounds.h"
#include "transport/host.h"

namespace fastsync {

// Collectives of all ranks of the group, which take bytes of whole values. All ranks call the same one with the same
// sizes. Numbers of ranks, and the order of pieces, are the group's.
class Hosts {
 public:
  using Gloo = c10::intrusive_ptr<c10d::Backend>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;

  // `between` is Gloo's group of the hosts' first ranks, in the order of the hosts; null on other ranks, and if there
  // is one host. Ranks tell in the store why they have failed.
  Hosts(std::shared_ptr<const Host> host, std::shared_ptr<Rounds> rounds, Gloo between, StorePtr store);

  int64_t count() const { return static_cast<int64_t>(host_->hosts().size()); }
  const std::shared_ptr<const Host>& host() const { return host_; }
  int64_t rank() const { return host_->rank(); }
  int64_t size() const { return size_; }
  // The ranks of this host. A collective's body may use them alone if there is one host.
  Rounds& rounds() { return *rounds_; }

  // Says why this rank can do no more, to the ranks of all hosts.
  void fail(const std::string& why);
  // Has waits of this rank fail, now and from now on.
  void abort();

  void barrier();
  void broadcast(const at::Tensor& data, int64_t root);
  // Sums of one host are added to those of another one. All ranks get the same bits.
  void all_reduce(const at::Tensor& data, const Reducing& reducing);
  // Reduces piece r of all ranks into rank r's output, which may be this rank's own piece.
  void reduce_scatter(const Pieces& pieces, const at::Tensor& output, const Reducing& reducing);
  void all_gather(const at::Tensor& input, const Pieces& outputs);

 private:
  using Meeting = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& between)>;

  bool is_first() const { return rounds_->rank() == 0; }
  // The first ranks of the hosts meet, and the others go on.
  void meet(const Meeting& meeting);
  std::string reason_of_another_host() const;

  const std::shared_ptr<const Host> host_;
  const std::shared_ptr<Rounds> rounds_;
  const Gloo between_;
  const StorePtr store_;
  const int64_t size_;
  int64_t own_ = 0;  // the index of this rank's host
};

}  // namespace fastsync
