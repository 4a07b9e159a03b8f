// A process group for the fake device that keeps NCCL's rules: what is called runs on a stream of its own, a wait
// is the current stream's and never the host's, and calls between startCoalescing and endCoalescing run at its end, or
// at once. The data travels through Gloo, at once.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fake_device {

// Tensors that the group keeps until somebody waits.
using Stash = std::shared_ptr<std::vector<at::Tensor>>;

class Group : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);

  // Its rules are NCCL's, so the engine is to treat it as NCCL.
  const std::string getBackendName() const override { return runs_at_once_ ? "nccl2" : "nccl"; }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  Work endCoalescing() override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  // A rank's own output may be its own input: then nothing of it is touched, as NCCL skips it.
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;

  // The call after so many more throws, before anything is sent.
  void fail_after(int64_t calls) { calls_until_failure_ = calls; }
  bool is_open() const { return is_open_; }
  // From now on calls inside a group run as those outside do, and what endCoalescing returns waits for nothing: as
  // collectives of torch 2.14's ProcessGroupNCCL2 and of torchcomms do.
  void run_at_once() { runs_at_once_ = true; }
  // How many tensors the group has lent.
  int64_t num_lent() const { return num_lent_; }
  // Of tensors that the group still keeps because nobody has waited.
  int64_t kept_bytes();

 private:
  // A call that has its place on a stream; on_gloo starts it on the tensors' memory.
  struct Given {
    std::string name;
    c10::Stream stream;
    Tensors read;
    Tensors written;
    std::function<Work()> on_gloo;
  };

  Work give(const std::string& name, Tensors read, Tensors written, bool is_async, std::function<Work()> on_gloo,
            std::optional<int> peer = {});
  void check(const std::string& name, const Tensors& tensors, c10::Device device);
  Work run(std::vector<Given> all);
  Work on_stream(const std::vector<Given>& all);
  c10::Stream stream_of(c10::Device device, std::optional<int> peer);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<std::pair<int, int>, c10::Stream> streams_;  // by device, and by peer for messages outside a group
  bool is_open_ = false;
  bool has_failed_ = false;
  bool runs_at_once_ = false;
  int64_t calls_until_failure_ = -1;
  std::atomic<int64_t> num_lent_ = 0;
  std::vector<Given> queued_;
  std::vector<Work> under_way_;  // on Gloo, of calls that have run inside a group
  std::mutex mutex_;             // guards what follows
  std::vector<Stash> stashes_;
};

}  // namespace fake_device
