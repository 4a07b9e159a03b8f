#include "backend/host_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "backend/collectives.h"
#include "backend/hosts.h"
#include "backend/mail.h"
#include "backend/reductions.h"
#include "backend/rounds.h"
#include "backend/tensors.h"

namespace fastsync {

namespace {

using Tensors = HostBackend::Tensors;
using Lists = HostBackend::Lists;

// Returns what c10d's checks call with what is wrong.
auto refusal_of(const char* name) {
  return [name](const std::string& what) { TORCH_CHECK(false, "fastsync: ", name, ": ", what); };
}

void check_dense(const char* name, const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_cpu(), "fastsync: ", name,
                ": expected dense tensors on the CPU, got ", tensor.layout(), " on ", tensor.device());
  }
}

uint64_t hash_of(c10d::OpType type, std::initializer_list<int64_t> numbers) {
  uint64_t hash = 0xCBF29CE484222325ULL + static_cast<uint64_t>(type);
  for (const int64_t number : numbers) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
  }
  return hash * 0x9E3779B97F4A7C15ULL;
}

// Checks that the larger tensor has one piece of the smaller one's size for each rank.
void check_pieces(const char* name, const at::Tensor& larger, const at::Tensor& smaller, int64_t size) {
  check_dense(name, {larger, smaller});
  TORCH_CHECK(larger.scalar_type() == smaller.scalar_type(), "fastsync: ", name, ": input and output have dtypes ",
              smaller.scalar_type(), " and ", larger.scalar_type(), "; they must have the same");
  TORCH_CHECK(larger.numel() == smaller.numel() * size, "fastsync: ", name, ": expected a tensor of ",
              smaller.numel() * size, " values, ", size, " times as many as the other's, got ", larger.numel());
}

// Checks lists that have a tensor for each rank, all like one tensor.
void check_list(const char* name, const Tensors& list, const at::Tensor& like, int64_t size) {
  TORCH_CHECK(static_cast<int64_t>(list.size()) == size, "fastsync: ", name, ": expected a list of ", size,
              " tensors, one for each rank, got ", list.size());
  check_dense(name, list);
  c10d::assertTypeAndSizesMatch(refusal_of(name), list, like.options(), like.sizes());
}

// Checks that the root, and nobody else, has a list for all ranks.
void check_root_list(const char* name, const Lists& lists, const at::Tensor& like, int64_t size, bool is_root) {
  TORCH_CHECK(lists.size() == (is_root ? 1 : 0), "fastsync: ", name, ": expected ",
              is_root ? "one list of tensors on the root" : "no list of tensors on a rank that is not the root",
              ", got ", lists.size());
  if (is_root) {
    check_list(name, lists[0], like, size);
  }
}

const char* const kAllGather = "fastsync:all_gather";
const char* const kReduceScatter = "fastsync:reduce_scatter";

}  // namespace

// What is told about a collective beside its tensors.
struct HostBackend::Call {
  template <class Options>
  Call(c10d::OpType of_type, const char* of_name, const char* of_title, const Options& options,
       std::initializer_list<int64_t> agreed)
      : type(of_type),
        name(of_name),
        title(of_title),
        timeout(options.timeout),
        is_async(options.asyncOp),
        agreement(hash_of(of_type, agreed)) {}

  c10d::OpType type;
  const char* name;   // as in torch.distributed
  const char* title;  // as the profiler has it
  std::chrono::milliseconds timeout;
  bool is_async;
  uint64_t agreement;
};

namespace {

// Has ranks tell each other texts through their store, before they have a group.
Host::Exchange exchange_in(const HostBackend::StorePtr& store, int rank, int size, std::chrono::milliseconds timeout) {
  return [=, number = 0](const std::string& text) mutable {
    std::vector<std::string> keys;
    for (int other = 0; other < size; ++other) {
      keys.push_back(c10::str("exchange ", number, " of rank ", other));
    }
    ++number;
    store->set(keys[rank], text);
    try {
      store->wait(keys, timeout);
    } catch (const std::exception&) {
      std::string missing;
      for (int other = 0; other < size; ++other) {
        missing += store->check({keys[other]}) ? "" : c10::str(missing.empty() ? "" : ", ", other);
      }
      TORCH_CHECK_WITH(DistBackendError, missing.empty(), "fastsync: Timed out waiting ",
                       std::chrono::duration<double>(timeout).count(), " s for rank ", missing,
                       " to make the process group");
      throw;
    }
    std::vector<std::string> texts;
    for (const std::vector<uint8_t>& text_of_rank : store->multiGet(keys)) {
      texts.emplace_back(text_of_rank.begin(), text_of_rank.end());
    }
    return texts;
  };
}

}  // namespace

HostBackend::HostBackend(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout,
                         MakeGloo make_gloo)
    : Backend(rank, size),
      store_(c10::make_intrusive<c10d::PrefixStore>("fastsync", store)),
      make_gloo_(make_gloo),
      options_(c10::make_intrusive<Options>("fastsync", timeout)) {
  init();
  try {
    const Host::Exchange exchange = exchange_in(store_, rank, size, timeout);
    const auto host = std::make_shared<const Host>(rank, exchange);
    const auto num_local = static_cast<int64_t>(host->ranks().size());
    const int64_t rounds_bytes = Rounds::bytes_of_a_rank(num_local);
    const int64_t part = rounds_bytes + Mail::bytes_of_a_rank(num_local);
    const auto memory = host->share(exchange, num_local * part);
    const auto rounds = std::make_shared<Rounds>(host, memory, part);
    const auto num_hosts = static_cast<int>(host->hosts().size());
    c10::intrusive_ptr<Backend> between;
    if (num_hosts > 1 && rounds->rank() == 0) {
      const auto own = std::ranges::find(host->hosts(), host->ranks()) - host->hosts().begin();
      const auto of_hosts = c10::make_intrusive<c10d::PrefixStore>("hosts", store_);
      between = make_gloo_(of_hosts, static_cast<int>(own), num_hosts, timeout);
    }
    hosts_ = std::make_shared<Hosts>(host, rounds, std::move(between), store_);
    mail_ = num_hosts == 1 ? std::make_shared<Mail>(rounds, memory, part, rounds_bytes) : nullptr;
  } catch (const CannotShare& failure) {
    why_not_shared_ = failure.why;
  }
  if (!is_on_one_host()) {
    gloo();
  }
}

HostBackend::~HostBackend() {
  if (mail_) {
    mail_->close();
  }
}

bool HostBackend::is_on_one_host() const { return hosts_ && hosts_->count() == 1; }

std::shared_ptr<const Host> HostBackend::host() const { return hosts_ ? hosts_->host() : nullptr; }

c10d::Backend& HostBackend::gloo() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!gloo_) {
    gloo_ = make_gloo_(c10::make_intrusive<c10d::PrefixStore>("gloo", store_), rank_, size_, options_->timeout);
  }
  return *gloo_;
}

void HostBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (gloo_) {
    gloo_->setTimeout(timeout);
  }
}

c10::intrusive_ptr<c10d::Backend> HostBackend::split(const StorePtr& store, const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    return nullptr;
  }
  return merge(store, options, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> HostBackend::merge(const StorePtr& store, const c10::intrusive_ptr<Options>& options,
                                                     const int& rank, const int& size) {
  return c10::make_intrusive<HostBackend>(store, rank, size, options->timeout, make_gloo_);
}

void HostBackend::abort() {
  if (hosts_) {
    hosts_->abort();
  }
  if (mail_) {
    mail_->fail("this process group was aborted");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (gloo_) {
    gloo_->abort();
  }
}

void HostBackend::shutdown() {
  queue_->run_all();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (gloo_) {
    gloo_->shutdown();
  }
}

HostBackend::WorkPtr HostBackend::post(const Call& call, const Tensors& inputs, Lists outputs,
                                       std::function<void(Hosts&)> body) {
  const uint64_t number = ++num_posted_;
  const Collective collective{call.name, static_cast<int64_t>(number), call.agreement,
                              call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout};
  auto run = [hosts = hosts_, collective, body = std::move(body)](bool beside_caller) {
    hosts->rounds().check(collective.name);
    try {
      hosts->rounds().begin(collective, beside_caller);
      body(*hosts);
    } catch (const c10::Error& error) {
      hosts->fail(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      hosts->fail(error.what());
      throw;
    }
  };
  auto work = c10::make_intrusive<CollectiveWork>(queue_, rank_, call.type, call.title, inputs, std::move(outputs),
                                                  number, std::move(run));
  queue_->post(work, call.is_async);
  return work;
}

HostBackend::WorkPtr HostBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!hosts_ || tensors.size() != 1) {
    return gloo().broadcast(tensors, options);
  }
  const char* const name = "broadcast";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  check_dense(name, tensors);
  const Call call(c10d::OpType::BROADCAST, name, "fastsync:broadcast", options, {num_bytes(tensors), root});
  return post(call, tensors, {tensors}, [tensor = tensors[0], root](Hosts& hosts) {
    const at::Tensor data = to_write(tensor, /*keeps_content=*/hosts.rank() == root);
    hosts.broadcast(data, root);
    if (hosts.rank() != root) {
      put_back(tensor, data);
    }
  });
}

HostBackend::WorkPtr HostBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!hosts_ || tensors.size() != 1 || tensors[0].layout() != at::kStrided) {
    return gloo().allreduce(tensors, options);
  }
  return all_reduce(c10d::OpType::ALLREDUCE, "all_reduce", tensors, options);
}

HostBackend::WorkPtr HostBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return gloo().allreduce_sparse(tensors, options);
}

HostBackend::WorkPtr HostBackend::allreduce_coalesced(Tensors& tensors,
                                                      const c10d::AllreduceCoalescedOptions& options) {
  if (!hosts_) {
    return gloo().allreduce_coalesced(tensors, options);
  }
  const char* const name = "all_reduce_coalesced";
  c10d::assertNonEmpty(refusal_of(name), tensors);
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "fastsync: ", name, ": tensors have dtypes ",
                tensors[0].scalar_type(), " and ", tensor.scalar_type(), "; they must have the same");
  }
  return all_reduce(c10d::OpType::ALLREDUCE_COALESCED, name, tensors, options);
}

HostBackend::WorkPtr HostBackend::all_reduce(c10d::OpType type, const char* name, const Tensors& tensors,
                                             const c10d::AllreduceOptions& options) {
  check_dense(name, tensors);
  const Reducing reducing(name, tensors[0].scalar_type(), options.reduceOp, size_);
  const Call call(type, name, "fastsync:all_reduce", options, {num_bytes(tensors), reducing.number});
  return post(call, tensors, {tensors}, [tensors, reducing](Hosts& hosts) {
    for (const at::Tensor& tensor : tensors) {
      const at::Tensor data = to_write(tensor, /*keeps_content=*/true);
      hosts.all_reduce(data, reducing);
      reducing.finish(data);
      put_back(tensor, data);
    }
  });
}

HostBackend::WorkPtr HostBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!is_on_one_host()) {
    return gloo().reduce(tensors, options);
  }
  const char* const name = "reduce";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  c10d::assertSingleElement(refusal_of(name), tensors);
  check_dense(name, tensors);
  const Reducing reducing(name, tensors[0].scalar_type(), options.reduceOp, size_);
  const Call call(c10d::OpType::REDUCE, name, "fastsync:reduce", options, {num_bytes(tensors), reducing.number, root});
  return post(call, tensors, {tensors}, [tensor = tensors[0], reducing, root](Hosts& hosts) {
    const at::Tensor data = to_write(tensor, /*keeps_content=*/true);
    fastsync::reduce(hosts.rounds(), bytes_of(data), num_bytes(data), reducing.function, root);
    if (hosts.rank() == root) {
      reducing.finish(data);
      put_back(tensor, data);
    }
  });
}

HostBackend::WorkPtr HostBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (!hosts_ || inputs.size() != 1) {
    return gloo().allgather(outputs, inputs, options);
  }
  const char* const name = "all_gather";
  TORCH_CHECK(outputs.size() == 1, "fastsync: ", name, ": expected one output list, got ", outputs.size());
  check_dense(name, inputs);
  check_list(name, outputs[0], inputs[0], size_);
  return all_gather({c10d::OpType::ALLGATHER, name, kAllGather, options, {num_bytes(inputs)}}, inputs, outputs,
                    outputs);
}

HostBackend::WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  if (!hosts_) {
    return gloo()._allgather_base(output, input, options);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

HostBackend::WorkPtr HostBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  if (!hosts_) {
    return gloo().allgather_coalesced(outputs, inputs, options);
  }
  const char* const name = "all_gather_coalesced";
  c10d::assertNonEmpty(refusal_of(name), inputs);
  check_dense(name, inputs);
  c10d::assertAllgatherCoalescedOutputTensorLists(refusal_of(name), outputs, inputs.size(), size_);
  Lists of_inputs(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) {
      of_inputs[i].push_back(of_rank[i]);
    }
    check_list(name, of_inputs[i], inputs[i], size_);
  }
  return all_gather({c10d::OpType::ALLGATHER_COALESCED, name, kAllGather, options, {num_bytes(inputs)}}, inputs,
                    of_inputs, outputs);
}

HostBackend::WorkPtr HostBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& options) {
  if (!hosts_) {
    return gloo().allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  const char* const name = "all_gather_into_tensor";
  c10d::assertInputOutputTensorListsSameSize(refusal_of(name), outputs.size(), inputs.size());
  Lists of_inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pieces(name, outputs[i], inputs[i], size_);
    of_inputs.push_back({outputs[i]});
  }
  return all_gather({c10d::OpType::_ALLGATHER_BASE, name, kAllGather, options, {num_bytes(inputs)}}, inputs, of_inputs,
                    {outputs});
}

HostBackend::WorkPtr HostBackend::all_gather(const Call& call, const Tensors& inputs, const Lists& of_inputs,
                                             const Lists& outputs) {
  return post(call, inputs, outputs, [inputs, of_inputs](Hosts& hosts) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor read = to_read(inputs[i]);
      const Tensors written = to_write(of_inputs[i]);
      hosts.all_gather(read, pieces_of(written, hosts.size()));
      put_back(of_inputs[i], written);
    }
  });
}

HostBackend::WorkPtr HostBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  if (!is_on_one_host()) {
    return gloo().gather(outputs, inputs, options);
  }
  const char* const name = "gather";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  c10d::assertSingleElementInput(refusal_of(name), inputs);
  check_dense(name, inputs);
  check_root_list(name, outputs, inputs[0], size_, rank_ == root);
  const Call call(c10d::OpType::GATHER, name, "fastsync:gather", options, {num_bytes(inputs), root});
  const Tensors list = outputs.empty() ? Tensors() : outputs[0];
  return post(call, inputs, outputs, [list, input = inputs[0], root](Hosts& hosts) {
    const at::Tensor read = to_read(input);
    const Tensors written = to_write(list);
    fastsync::gather(hosts.rounds(), bytes_of(read), pieces_of(written, static_cast<int64_t>(list.size())),
                     num_bytes(read), root);
    put_back(list, written);
  });
}

HostBackend::WorkPtr HostBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  if (!is_on_one_host()) {
    return gloo().scatter(outputs, inputs, options);
  }
  const char* const name = "scatter";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  c10d::assertSingleElementOutput(refusal_of(name), outputs);
  check_dense(name, outputs);
  check_root_list(name, inputs, outputs[0], size_, rank_ == root);
  const Call call(c10d::OpType::SCATTER, name, "fastsync:scatter", options, {num_bytes(outputs), root});
  const Tensors list = inputs.empty() ? Tensors() : inputs[0];
  return post(call, list, {outputs}, [list, output = outputs[0], root](Hosts& hosts) {
    const Tensors read = to_read(list);
    const at::Tensor written = to_write(output);
    fastsync::scatter(hosts.rounds(), pieces_of(read, static_cast<int64_t>(list.size())), bytes_of(written),
                      num_bytes(written), root);
    put_back(output, written);
  });
}

HostBackend::WorkPtr HostBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  const char* const name = "reduce_scatter";
  if (!hosts_) {
    return gloo().reduce_scatter(outputs, inputs, options);
  }
  c10d::assertSingleElementOutput(refusal_of(name), outputs);
  check_dense(name, outputs);
  TORCH_CHECK(inputs.size() == 1 && inputs[0].size() == static_cast<size_t>(size_), "fastsync: ", name,
              ": expected a list of ", size_, " tensors, one for each rank, got ",
              inputs.size() == 1 ? inputs[0].size() : inputs.size());
  check_dense(name, inputs[0]);
  for (int64_t rank = 0; rank < size_; ++rank) {
    c10d::assertTypeMatch(refusal_of(name), outputs[0].options(), inputs[0], rank);
  }
  TORCH_CHECK(inputs[0][rank_].numel() == outputs[0].numel(), "fastsync: ", name, ": this rank's input has ",
              inputs[0][rank_].numel(), " values, and its output ", outputs[0].numel());
  const bool are_equal =
      std::ranges::all_of(inputs[0], [&](const at::Tensor& input) { return input.numel() == inputs[0][0].numel(); });
  if (are_equal) {
    return reduce_scatter(c10d::OpType::REDUCE_SCATTER, name, inputs, outputs, options);
  }
  if (!is_on_one_host()) {
    return gloo().reduce_scatter(outputs, inputs, options);
  }
  // Pieces of different sizes go to one rank after the other.
  const Reducing reducing(name, outputs[0].scalar_type(), options.reduceOp, size_);
  const Call call(c10d::OpType::REDUCE_SCATTER, name, kReduceScatter, options, {-1, reducing.number});
  return post(call, inputs[0], {outputs}, [list = inputs[0], output = outputs[0], reducing](Hosts& hosts) {
    for (int64_t rank = 0; rank < hosts.size(); ++rank) {
      const at::Tensor read = to_read(list[rank]);
      const at::Tensor piece = rank == hosts.rank() ? read.clone() : read;
      fastsync::reduce(hosts.rounds(), bytes_of(piece), num_bytes(piece), reducing.function, rank);
      if (rank == hosts.rank()) {
        reducing.finish(piece);
        output.copy_(piece.view_as(output));
      }
    }
  });
}

HostBackend::WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  if (!hosts_) {
    return gloo()._reduce_scatter_base(output, input, options);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

HostBackend::WorkPtr HostBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& options) {
  if (!hosts_) {
    return gloo().reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  const char* const name = "reduce_scatter_tensor";
  c10d::assertNonEmpty(refusal_of(name), outputs);
  c10d::assertInputOutputTensorListsSameSize(refusal_of(name), outputs.size(), inputs.size());
  Lists of_outputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pieces(name, inputs[i], outputs[i], size_);
    of_outputs.push_back({inputs[i]});
  }
  return reduce_scatter(c10d::OpType::_REDUCE_SCATTER_BASE, name, of_outputs, outputs, options);
}

HostBackend::WorkPtr HostBackend::reduce_scatter(c10d::OpType type, const char* name, const Lists& of_outputs,
                                                 const Tensors& outputs, const c10d::ReduceScatterOptions& options) {
  std::vector<Reducing> reducings;
  for (const at::Tensor& output : outputs) {
    reducings.emplace_back(name, output.scalar_type(), options.reduceOp, size_);
  }
  const Call call(type, name, kReduceScatter, options, {num_bytes(outputs), reducings[0].number});
  return post(call, of_outputs[0], {outputs}, [of_outputs, outputs, reducings](Hosts& hosts) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Tensors read = to_read(of_outputs[i]);
      const at::Tensor written = to_write(outputs[i]);
      hosts.reduce_scatter(pieces_of(read, hosts.size()), written, reducings[i]);
      reducings[i].finish(written);
      put_back(outputs[i], written);
    }
  });
}

HostBackend::WorkPtr HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& options) {
  if (!is_on_one_host()) {
    return gloo().alltoall_base(output, input, output_splits, input_splits, options);
  }
  const char* const name = "all_to_all_single";
  check_dense(name, {output, input});
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "fastsync: ", name, ": input and output have dtypes ",
              input.scalar_type(), " and ", output.scalar_type(), "; they must have the same");
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  return all_to_all({c10d::OpType::ALLTOALL_BASE, name, "fastsync:all_to_all", options, {}}, {input},
                    sizes_of({input}, size_, input_splits), {output}, sizes_of({output}, size_, output_splits));
}

HostBackend::WorkPtr HostBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (!is_on_one_host()) {
    return gloo().alltoall(outputs, inputs, options);
  }
  const char* const name = "all_to_all";
  for (const Tensors* tensors : {&outputs, &inputs}) {
    TORCH_CHECK(tensors->size() == static_cast<size_t>(size_), "fastsync: ", name, ": expected a list of ", size_,
                " tensors, one for each rank, got ", tensors->size());
    check_dense(name, *tensors);
  }
  return all_to_all({c10d::OpType::ALLTOALL, name, "fastsync:all_to_all", options, {}}, inputs, sizes_of(inputs, size_),
                    outputs, sizes_of(outputs, size_));
}

HostBackend::WorkPtr HostBackend::all_to_all(const Call& call, const Tensors& inputs,
                                             const std::vector<int64_t>& input_sizes, const Tensors& outputs,
                                             const std::vector<int64_t>& output_sizes) {
  return post(call, inputs, {outputs}, [inputs, input_sizes, outputs, output_sizes](Hosts& hosts) {
    const Tensors read = to_read(inputs);
    const Tensors written = to_write(outputs);
    fastsync::all_to_all(hosts.rounds(), pieces_of(read, input_sizes), input_sizes, pieces_of(written, output_sizes),
                         output_sizes);
    put_back(outputs, written);
  });
}

HostBackend::WorkPtr HostBackend::barrier(const c10d::BarrierOptions& options) {
  if (!hosts_) {
    return gloo().barrier(options);
  }
  return post({c10d::OpType::BARRIER, "barrier", "fastsync:barrier", options, {}}, {}, {},
              [](Hosts& hosts) { hosts.barrier(); });
}

// The error of a barrier names all ranks that have not come.
void HostBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  if (!is_on_one_host()) {
    gloo().monitoredBarrier(options, wait_all_ranks);
    return;
  }
  c10d::BarrierOptions waited_for = options;
  waited_for.asyncOp = false;
  post({c10d::OpType::BARRIER, "monitored_barrier", "fastsync:monitored_barrier", waited_for, {1}}, {}, {},
       [](Hosts& hosts) { hosts.barrier(); })
      ->wait();
}

HostBackend::WorkPtr HostBackend::send(Tensors& tensors, int to, int tag) {
  if (!mail_) {
    return gloo().send(tensors, to, tag);
  }
  check_message("send", tensors, to, tag);
  return mail_->send(tensors[0], to, tag, options_->timeout);
}

HostBackend::WorkPtr HostBackend::recv(Tensors& tensors, int from, int tag) {
  if (!mail_) {
    return gloo().recv(tensors, from, tag);
  }
  check_message("recv", tensors, from, tag);
  return mail_->receive(tensors[0], from, tag, options_->timeout);
}

HostBackend::WorkPtr HostBackend::recvAnysource(Tensors& tensors, int tag) {
  if (!mail_) {
    return gloo().recvAnysource(tensors, tag);
  }
  check_message("recv", tensors, (rank_ + 1) % size_, tag);
  return mail_->receive(tensors[0], Mail::kAnyRank, tag, options_->timeout);
}

void HostBackend::check_message(const char* name, const Tensors& tensors, int peer, int tag) const {
  c10d::assertSingleElement(refusal_of(name), tensors);
  check_dense(name, tensors);
  TORCH_CHECK(lies_in_one_piece(tensors[0]), "fastsync: ", name, ": the tensor has to be contiguous");
  TORCH_CHECK(peer >= 0 && peer < size_ && peer != rank_, "fastsync: ", name, ": expected another rank of ", size_,
              " than this one, ", rank_, ", got ", peer);
  TORCH_CHECK(tag >= 0, "fastsync: ", name, ": expected a tag of 0 or more, got ", tag);
}

}  // namespace fastsync
