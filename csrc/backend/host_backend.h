// The backend "fastsync" of torch.distributed: collectives and messages of CPU ranks in the memory of their host, and
// over Gloo between hosts.
//
// Note [What goes to Gloo]
// All ranks agree when they make a group.
// - On one host everything but sparse tensors stays in memory. The first of these makes the group of Gloo.
// - Of ranks on several hosts, of which two share one, what Hosts can do takes that way. The rest is left to Gloo.
// - Ranks that cannot share memory leave everything to Gloo.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "backend/work.h"
#include "transport/host.h"

namespace fastsync {

class Hosts;
class Mail;

// Its methods take what Gloo's take, and throw where those throw. Errors of the world are c10::DistBackendError.
class HostBackend final : public c10d::Backend, public HasHost {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  // Makes a Gloo group. It is a function of Python, because torch's packages lack Gloo's headers.
  using MakeGloo = c10::intrusive_ptr<Backend> (*)(const StorePtr&, int rank, int size, std::chrono::milliseconds);

  // It is a collective of all ranks.
  HostBackend(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout, MakeGloo make_gloo);
  ~HostBackend() override;

  const std::string getBackendName() const override { return "fastsync"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_posted_; }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const StorePtr& store, const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;

  // Whether ranks share memory, and why not; empty if they do.
  bool shares_memory() const { return hosts_ != nullptr; }
  const std::string& why_not_shared() const { return why_not_shared_; }
  std::shared_ptr<const Host> host() const override;

  // Has everything that waits in this group fail, now and from now on. On the other ranks it fails too.
  void abort() override;
  // Returns when the collectives that were called have ended.
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  struct Call;

  bool is_on_one_host() const;
  // Gloo's group, which is made when it is first needed.
  Backend& gloo();
  WorkPtr post(const Call& call, const Tensors& inputs, Lists outputs, std::function<void(Hosts&)> body);

  // Collectives that have several forms. For each input or output there is a list of the tensors of all ranks, or one
  // tensor that holds all.
  WorkPtr all_reduce(c10d::OpType type, const char* name, const Tensors& tensors,
                     const c10d::AllreduceOptions& options);
  WorkPtr all_gather(const Call& call, const Tensors& inputs, const Lists& of_inputs, const Lists& outputs);
  WorkPtr reduce_scatter(c10d::OpType type, const char* name, const Lists& of_outputs, const Tensors& outputs,
                         const c10d::ReduceScatterOptions& options);
  WorkPtr all_to_all(const Call& call, const Tensors& inputs, const std::vector<int64_t>& input_sizes,
                     const Tensors& outputs, const std::vector<int64_t>& output_sizes);
  void check_message(const char* name, const Tensors& tensors, int peer, int tag) const;

  const StorePtr store_;
  const MakeGloo make_gloo_;
  const c10::intrusive_ptr<Options> options_;
  std::string why_not_shared_;
  std::shared_ptr<Hosts> hosts_;  // null if Gloo takes everything
  std::shared_ptr<Mail> mail_;    // null unless all ranks are on one host
  const std::shared_ptr<WorkQueue> queue_ = std::make_shared<WorkQueue>();
  std::atomic<uint64_t> num_posted_ = 0;
  std::mutex mutex_;                  // guards the next
  c10::intrusive_ptr<Backend> gloo_;  // null until it is needed
};

}  // namespace fastsync
