#include "backend/host_backend.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>

#include "backend/collectives.h"
#include "backend/reductions.h"

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

// Memory that ranks can read or write as bytes lies in one piece. A tensor that does not gets a copy.
bool lies_in_one_piece(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor to_read(const at::Tensor& tensor) {
  return lies_in_one_piece(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

// Returns memory for what the tensor will hold, with the same content or with any.
at::Tensor to_write(const at::Tensor& tensor, bool keeps_content = false) {
  if (lies_in_one_piece(tensor)) {
    return tensor;
  }
  return keeps_content ? to_read(tensor) : at::empty(tensor.sizes(), tensor.options());
}

Tensors to_write(const Tensors& tensors) {
  Tensors written;
  for (const at::Tensor& tensor : tensors) {
    written.push_back(to_write(tensor));
  }
  return written;
}

void put_back(const at::Tensor& tensor, const at::Tensor& written) {
  if (!lies_in_one_piece(tensor)) {
    tensor.copy_(written);
  }
}

void put_back(const Tensors& tensors, const Tensors& written) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    put_back(tensors[i], written[i]);
  }
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

int64_t num_bytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

Pieces pieces_of(const Tensors& tensors) {
  Pieces pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(bytes_of(tensor));
  }
  return pieces;
}

// The pieces of a tensor that has one for each rank.
Pieces pieces_of(const at::Tensor& tensor, int64_t size) {
  Pieces pieces;
  for (int64_t rank = 0; rank < size; ++rank) {
    pieces.push_back(bytes_of(tensor) + num_bytes(tensor) / size * rank);
  }
  return pieces;
}

uint64_t hash_of(std::initializer_list<int64_t> numbers) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const int64_t number : numbers) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
  }
  return hash * 0x9E3779B97F4A7C15ULL;
}

// How values of a dtype are reduced. A complex sum is that of real and imaginary parts.
struct Reducing {
  Reducing(const char* name, at::ScalarType dtype, const c10d::ReduceOp& reduce_op, int64_t num_ranks)
      : op(reduce_op), size(num_ranks) {
    const bool is_sum = op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG;
    const at::ScalarType real = at::isComplexType(dtype) && is_sum ? at::toRealValueType(dtype) : dtype;
    TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "fastsync: ", name, ": cannot use ReduceOp.PREMUL_SUM");
    const bool is_divided = op == c10d::ReduceOp::AVG;
    TORCH_CHECK(!is_divided || at::isFloatingType(real), "fastsync: ", name, ": cannot use ReduceOp.AVG with ", dtype);
    function = reduction_of(real, op);
    const bool needs_integers = op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
    TORCH_CHECK(function != nullptr || !needs_integers, "fastsync: ", name,
                ": cannot use a bitwise ReduceOp with non-integral dtype ", dtype);
    TORCH_CHECK(function != nullptr, "fastsync: ", name, ": cannot reduce ", dtype);
    number = static_cast<int64_t>(op) * 256 + static_cast<int64_t>(real);
  }

  void finish(const at::Tensor& sum) const {
    if (op == c10d::ReduceOp::AVG) {
      (sum.is_complex() ? at::view_as_real(sum) : sum).div_(size);
    }
  }

  c10d::ReduceOp::RedOpType op;
  int64_t size;
  int64_t number = 0;  // tells it from others
  Reduction function = nullptr;
};

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

}  // namespace

// What is told about a collective beside its tensors.
struct HostBackend::Call {
  c10d::OpType type;
  const char* name;   // as in torch.distributed
  const char* title;  // as the profiler has it
  std::chrono::milliseconds timeout;
  bool is_async;
  uint64_t agreement;
};

HostBackend::HostBackend(const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout,
                         MakeGloo make_gloo)
    : Backend(rank, size),
      make_gloo_(make_gloo),
      options_(c10::make_intrusive<Options>("fastsync", timeout)),
      gloo_(make_gloo(store, rank, size, timeout)) {
  init();
  if (size == 1) {
    return;
  }
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, gloo_);
  try {
    auto host = std::make_shared<const Host>(group);
    if (host->hosts().size() <= 1) {  // none if ranks cannot share memory, for which Rounds has the reason
      rounds_ = std::make_shared<Rounds>(group, std::move(host));
    }
  } catch (const CannotShare&) {
  }
}

void HostBackend::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
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
  if (rounds_) {
    rounds_->abort();
  }
  gloo_->abort();
}

void HostBackend::shutdown() {
  queue_->run_all();
  gloo_->shutdown();
}

HostBackend::WorkPtr HostBackend::post(const Call& call, const Tensors& inputs, Lists outputs,
                                       std::function<void(Rounds&)> body) {
  const uint64_t number = ++num_posted_;
  const Collective collective{call.name, static_cast<int64_t>(number), call.agreement,
                              call.timeout == c10d::kUnsetTimeout ? options_->timeout : call.timeout};
  auto run = [rounds = rounds_, collective, body = std::move(body)](bool beside_caller) {
    rounds->begin(collective, beside_caller);
    try {
      body(*rounds);
    } catch (const c10::Error& error) {
      rounds->fail(error.what_without_backtrace());
      throw;
    } catch (const std::exception& error) {
      rounds->fail(error.what());
      throw;
    }
  };
  auto work = c10::make_intrusive<CollectiveWork>(queue_, rank_, call.type, call.title, inputs, std::move(outputs),
                                                  number, std::move(run));
  queue_->post(work, call.is_async);
  return work;
}

HostBackend::WorkPtr HostBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (!rounds_ || tensors.size() != 1) {
    return gloo_->broadcast(tensors, options);
  }
  const char* const name = "broadcast";
  c10d::assertRootRank(refusal_of(name), options.rootRank, size_);
  check_dense(name, tensors);
  const int64_t root = options.rootRank;
  const uint64_t agreement = hash_of({static_cast<int64_t>(c10d::OpType::BROADCAST), num_bytes(tensors[0]), root});
  return post({c10d::OpType::BROADCAST, name, "fastsync:broadcast", options.timeout, options.asyncOp, agreement},
              tensors, {tensors}, [tensor = tensors[0], root](Rounds& rounds) {
                const at::Tensor data = to_write(tensor, /*keeps_content=*/rounds.rank() == root);
                fastsync::broadcast(rounds, bytes_of(data), num_bytes(data), root);
                if (rounds.rank() != root) {
                  put_back(tensor, data);
                }
              });
}

HostBackend::WorkPtr HostBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!rounds_ || tensors.size() != 1 || tensors[0].layout() != at::kStrided) {
    return gloo_->allreduce(tensors, options);
  }
  const char* const name = "all_reduce";
  check_dense(name, tensors);
  const Reducing reducing(name, tensors[0].scalar_type(), options.reduceOp, size_);
  const uint64_t agreement =
      hash_of({static_cast<int64_t>(c10d::OpType::ALLREDUCE), num_bytes(tensors[0]), reducing.number});
  return post({c10d::OpType::ALLREDUCE, name, "fastsync:all_reduce", options.timeout, options.asyncOp, agreement},
              tensors, {tensors}, [tensor = tensors[0], reducing](Rounds& rounds) {
                const at::Tensor data = to_write(tensor, /*keeps_content=*/true);
                all_reduce(rounds, bytes_of(data), num_bytes(data), reducing.function);
                reducing.finish(data);
                put_back(tensor, data);
              });
}

HostBackend::WorkPtr HostBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return gloo_->allreduce_sparse(tensors, options);
}

HostBackend::WorkPtr HostBackend::allreduce_coalesced(Tensors& tensors,
                                                      const c10d::AllreduceCoalescedOptions& options) {
  if (!rounds_) {
    return gloo_->allreduce_coalesced(tensors, options);
  }
  const char* const name = "all_reduce_coalesced";
  c10d::assertNonEmpty(refusal_of(name), tensors);
  check_dense(name, tensors);
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "fastsync: ", name, ": tensors have dtypes ",
                tensors[0].scalar_type(), " and ", tensor.scalar_type(), "; they must have the same");
    bytes += num_bytes(tensor);
  }
  const Reducing reducing(name, tensors[0].scalar_type(), options.reduceOp, size_);
  const auto type = c10d::OpType::ALLREDUCE_COALESCED;
  const uint64_t agreement = hash_of({static_cast<int64_t>(type), bytes, reducing.number});
  return post({type, name, "fastsync:all_reduce", options.timeout, options.asyncOp, agreement}, tensors, {tensors},
              [tensors, reducing](Rounds& rounds) {
                for (const at::Tensor& tensor : tensors) {
                  const at::Tensor data = to_write(tensor, /*keeps_content=*/true);
                  all_reduce(rounds, bytes_of(data), num_bytes(data), reducing.function);
                  reducing.finish(data);
                  put_back(tensor, data);
                }
              });
}

HostBackend::WorkPtr HostBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (!rounds_) {
    return gloo_->reduce(tensors, options);
  }
  const char* const name = "reduce";
  c10d::assertRootRank(refusal_of(name), options.rootRank, size_);
  c10d::assertSingleElement(refusal_of(name), tensors);
  check_dense(name, tensors);
  const Reducing reducing(name, tensors[0].scalar_type(), options.reduceOp, size_);
  const int64_t root = options.rootRank;
  const uint64_t agreement =
      hash_of({static_cast<int64_t>(c10d::OpType::REDUCE), num_bytes(tensors[0]), reducing.number, root});
  return post({c10d::OpType::REDUCE, name, "fastsync:reduce", options.timeout, options.asyncOp, agreement}, tensors,
              {tensors}, [tensor = tensors[0], reducing, root](Rounds& rounds) {
                const at::Tensor data = to_write(tensor, /*keeps_content=*/true);
                fastsync::reduce(rounds, bytes_of(data), num_bytes(data), reducing.function, root);
                if (rounds.rank() == root) {
                  reducing.finish(data);
                  put_back(tensor, data);
                }
              });
}

HostBackend::WorkPtr HostBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  if (!rounds_ || inputs.size() != 1) {
    return gloo_->allgather(outputs, inputs, options);
  }
  const char* const name = "all_gather";
  TORCH_CHECK(outputs.size() == 1, "fastsync: ", name, ": expected one output list, got ", outputs.size());
  check_dense(name, inputs);
  check_list(name, outputs[0], inputs[0], size_);
  const uint64_t agreement = hash_of({static_cast<int64_t>(c10d::OpType::ALLGATHER), num_bytes(inputs[0])});
  return post({c10d::OpType::ALLGATHER, name, "fastsync:all_gather", options.timeout, options.asyncOp, agreement},
              inputs, outputs, [list = outputs[0], input = inputs[0]](Rounds& rounds) {
                const at::Tensor read = to_read(input);
                const Tensors written = to_write(list);
                all_gather(rounds, bytes_of(read), pieces_of(written), num_bytes(read));
                put_back(list, written);
              });
}

HostBackend::WorkPtr HostBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                  const c10d::AllgatherOptions& options) {
  if (!rounds_) {
    return gloo_->_allgather_base(output, input, options);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

HostBackend::WorkPtr HostBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) {
  if (!rounds_) {
    return gloo_->allgather_coalesced(outputs, inputs, options);
  }
  const char* const name = "all_gather_coalesced";
  c10d::assertNonEmpty(refusal_of(name), inputs);
  check_dense(name, inputs);
  TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "fastsync: ", name, ": expected ", size_,
              " output lists, one for each rank, got ", outputs.size());
  int64_t bytes = 0;
  Lists lists(inputs.size());  // a list for each input
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "fastsync: ", name, ": expected lists of ", inputs.size(),
                  " tensors, one for each input, got one of ", of_rank.size());
      lists[i].push_back(of_rank[i]);
    }
    check_list(name, lists[i], inputs[i], size_);
    bytes += num_bytes(inputs[i]);
  }
  const auto type = c10d::OpType::ALLGATHER_COALESCED;
  const uint64_t agreement = hash_of({static_cast<int64_t>(type), bytes});
  return post({type, name, "fastsync:all_gather", options.timeout, options.asyncOp, agreement}, inputs, outputs,
              [lists, inputs](Rounds& rounds) {
                for (size_t i = 0; i < inputs.size(); ++i) {
                  const at::Tensor read = to_read(inputs[i]);
                  const Tensors written = to_write(lists[i]);
                  all_gather(rounds, bytes_of(read), pieces_of(written), num_bytes(read));
                  put_back(lists[i], written);
                }
              });
}

HostBackend::WorkPtr HostBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::AllgatherOptions& options) {
  if (!rounds_) {
    return gloo_->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  const char* const name = "all_gather_into_tensor";
  TORCH_CHECK(outputs.size() == inputs.size(), "fastsync: ", name, ": expected as many outputs as inputs, got ",
              outputs.size(), " and ", inputs.size());
  int64_t bytes = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pieces(name, outputs[i], inputs[i], size_);
    bytes += num_bytes(inputs[i]);
  }
  const auto type = c10d::OpType::_ALLGATHER_BASE;
  const uint64_t agreement = hash_of({static_cast<int64_t>(type), bytes});
  return post({type, name, "fastsync:all_gather", options.timeout, options.asyncOp, agreement}, inputs, {outputs},
              [outputs, inputs](Rounds& rounds) {
                for (size_t i = 0; i < inputs.size(); ++i) {
                  const at::Tensor read = to_read(inputs[i]);
                  const at::Tensor written = to_write(outputs[i]);
                  all_gather(rounds, bytes_of(read), pieces_of(written, rounds.size()), num_bytes(read));
                  put_back(outputs[i], written);
                }
              });
}

HostBackend::WorkPtr HostBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  if (!rounds_) {
    return gloo_->gather(outputs, inputs, options);
  }
  const char* const name = "gather";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  c10d::assertSingleElementInput(refusal_of(name), inputs);
  check_dense(name, inputs);
  if (rank_ == root) {
    TORCH_CHECK(outputs.size() == 1, "fastsync: ", name, ": expected one output list, got ", outputs.size());
    check_list(name, outputs[0], inputs[0], size_);
  } else {
    TORCH_CHECK(outputs.empty(), "fastsync: ", name, ": requires empty output on non-root");
  }
  const uint64_t agreement = hash_of({static_cast<int64_t>(c10d::OpType::GATHER), num_bytes(inputs[0]), root});
  return post({c10d::OpType::GATHER, name, "fastsync:gather", options.timeout, options.asyncOp, agreement}, inputs,
              outputs, [list = outputs.empty() ? Tensors() : outputs[0], input = inputs[0], root](Rounds& rounds) {
                const at::Tensor read = to_read(input);
                const Tensors written = to_write(list);
                fastsync::gather(rounds, bytes_of(read), pieces_of(written), num_bytes(read), root);
                put_back(list, written);
              });
}

HostBackend::WorkPtr HostBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  if (!rounds_) {
    return gloo_->scatter(outputs, inputs, options);
  }
  const char* const name = "scatter";
  const int64_t root = options.rootRank;
  c10d::assertRootRank(refusal_of(name), root, size_);
  c10d::assertSingleElementOutput(refusal_of(name), outputs);
  check_dense(name, outputs);
  if (rank_ == root) {
    TORCH_CHECK(inputs.size() == 1, "fastsync: ", name, ": expected one input list, got ", inputs.size());
    check_list(name, inputs[0], outputs[0], size_);
  } else {
    TORCH_CHECK(inputs.empty(), "fastsync: ", name, ": requires empty input on non-root");
  }
  const uint64_t agreement = hash_of({static_cast<int64_t>(c10d::OpType::SCATTER), num_bytes(outputs[0]), root});
  const Tensors list = inputs.empty() ? Tensors() : inputs[0];
  return post({c10d::OpType::SCATTER, name, "fastsync:scatter", options.timeout, options.asyncOp, agreement}, list,
              {outputs}, [list, output = outputs[0], root](Rounds& rounds) {
                Tensors read;
                for (const at::Tensor& tensor : list) {
                  read.push_back(to_read(tensor));
                }
                const at::Tensor written = to_write(output);
                fastsync::scatter(rounds, pieces_of(read), bytes_of(written), num_bytes(written), root);
                put_back(output, written);
              });
}

HostBackend::WorkPtr HostBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                 const c10d::ReduceScatterOptions& options) {
  if (!rounds_) {
    return gloo_->reduce_scatter(outputs, inputs, options);
  }
  const char* const name = "reduce_scatter";
  c10d::assertSingleElementOutput(refusal_of(name), outputs);
  check_dense(name, outputs);
  TORCH_CHECK(inputs.size() == 1, "fastsync: ", name, ": expected one input list, got ", inputs.size());
  TORCH_CHECK(inputs[0].size() == static_cast<size_t>(size_), "fastsync: ", name, ": expected a list of ", size_,
              " tensors, one for each rank, got ", inputs[0].size());
  check_dense(name, inputs[0]);
  const Reducing reducing(name, outputs[0].scalar_type(), options.reduceOp, size_);
  std::vector<int64_t> bytes;
  for (int64_t rank = 0; rank < size_; ++rank) {
    const at::Tensor& input = inputs[0][rank];
    c10d::assertTypeMatch(refusal_of(name), outputs[0].options(), inputs[0], rank);
    bytes.push_back(num_bytes(input));
  }
  TORCH_CHECK(bytes[rank_] == num_bytes(outputs[0]), "fastsync: ", name, ": this rank's input has ",
              inputs[0][rank_].numel(), " values, and its output ", outputs[0].numel());
  const bool are_equal = std::all_of(bytes.begin(), bytes.end(), [&](int64_t each) { return each == bytes[0]; });
  const auto type = c10d::OpType::REDUCE_SCATTER;
  const uint64_t agreement = hash_of({static_cast<int64_t>(type), are_equal ? bytes[0] : -1, reducing.number});
  return post({type, name, "fastsync:reduce_scatter", options.timeout, options.asyncOp, agreement}, inputs[0],
              {outputs}, [list = inputs[0], output = outputs[0], bytes, are_equal, reducing](Rounds& rounds) {
                Tensors read;
                for (const at::Tensor& tensor : list) {
                  read.push_back(to_read(tensor));
                }
                const at::Tensor written = to_write(output);
                if (are_equal) {
                  fastsync::reduce_scatter(rounds, pieces_of(read), bytes_of(written), bytes[0], reducing.function);
                } else {  // pieces of different sizes go to one rank after the other
                  for (int64_t rank = 0; rank < rounds.size(); ++rank) {
                    const at::Tensor piece = rank == rounds.rank() ? read[rank].clone() : read[rank];
                    fastsync::reduce(rounds, bytes_of(piece), bytes[rank], reducing.function, rank);
                    if (rank == rounds.rank()) {
                      written.copy_(piece.view_as(written));
                    }
                  }
                }
                reducing.finish(written);
                put_back(output, written);
              });
}

HostBackend::WorkPtr HostBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                       const c10d::ReduceScatterOptions& options) {
  if (!rounds_) {
    return gloo_->_reduce_scatter_base(output, input, options);
  }
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

HostBackend::WorkPtr HostBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                  const c10d::ReduceScatterOptions& options) {
  if (!rounds_) {
    return gloo_->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  const char* const name = "reduce_scatter_tensor";
  TORCH_CHECK(outputs.size() == inputs.size() && !outputs.empty(), "fastsync: ", name,
              ": expected as many outputs as inputs, got ", outputs.size(), " and ", inputs.size());
  int64_t bytes = 0;
  std::vector<Reducing> reducings;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pieces(name, inputs[i], outputs[i], size_);
    reducings.emplace_back(name, outputs[i].scalar_type(), options.reduceOp, size_);
    bytes += num_bytes(outputs[i]);
  }
  const auto type = c10d::OpType::_REDUCE_SCATTER_BASE;
  const uint64_t agreement = hash_of({static_cast<int64_t>(type), bytes, reducings[0].number});
  return post({type, name, "fastsync:reduce_scatter", options.timeout, options.asyncOp, agreement}, inputs, {outputs},
              [outputs, inputs, reducings](Rounds& rounds) {
                for (size_t i = 0; i < inputs.size(); ++i) {
                  const at::Tensor read = to_read(inputs[i]);
                  const at::Tensor written = to_write(outputs[i]);
                  fastsync::reduce_scatter(rounds, pieces_of(read, rounds.size()), bytes_of(written),
                                           num_bytes(written), reducings[i].function);
                  reducings[i].finish(written);
                  put_back(outputs[i], written);
                }
              });
}

HostBackend::WorkPtr HostBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                                const c10d::AllToAllOptions& options) {
  if (!rounds_) {
    return gloo_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  const char* const name = "all_to_all_single";
  check_dense(name, {output, input});
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "fastsync: ", name, ": input and output have dtypes ",
              input.scalar_type(), " and ", output.scalar_type(), "; they must have the same");
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  // A split counts rows of the first dimension.
  const auto bytes_of_splits = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    const int64_t row = rows == 0 ? 0 : num_bytes(tensor) / rows;
    std::vector<int64_t> bytes(size_, num_bytes(tensor) / size_);
    for (size_t rank = 0; rank < splits.size(); ++rank) {
      bytes[rank] = splits[rank] * row;
    }
    return bytes;
  };
  const auto type = c10d::OpType::ALLTOALL_BASE;
  return post(
      {type, name, "fastsync:all_to_all", options.timeout, options.asyncOp, hash_of({static_cast<int64_t>(type)})},
      {input}, {{output}},
      [output, input, input_bytes = bytes_of_splits(input, input_splits),
       output_bytes = bytes_of_splits(output, output_splits)](Rounds& rounds) {
        const auto pieces = [](const at::Tensor& tensor, const std::vector<int64_t>& bytes) {
          Pieces all;
          int64_t offset = 0;
          for (const int64_t each : bytes) {
            all.push_back(bytes_of(tensor) + offset);
            offset += each;
          }
          return all;
        };
        const at::Tensor read = to_read(input);
        const at::Tensor written = to_write(output);
        all_to_all(rounds, pieces(read, input_bytes), input_bytes, pieces(written, output_bytes), output_bytes);
        put_back(output, written);
      });
}

HostBackend::WorkPtr HostBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  if (!rounds_) {
    return gloo_->alltoall(outputs, inputs, options);
  }
  const char* const name = "all_to_all";
  for (const Tensors* tensors : {&outputs, &inputs}) {
    TORCH_CHECK(tensors->size() == static_cast<size_t>(size_), "fastsync: ", name, ": expected a list of ", size_,
                " tensors, one for each rank, got ", tensors->size());
    check_dense(name, *tensors);
  }
  const auto type = c10d::OpType::ALLTOALL;
  return post(
      {type, name, "fastsync:all_to_all", options.timeout, options.asyncOp, hash_of({static_cast<int64_t>(type)})},
      inputs, {outputs}, [outputs, inputs](Rounds& rounds) {
        Tensors read;
        std::vector<int64_t> input_bytes;
        std::vector<int64_t> output_bytes;
        for (size_t rank = 0; rank < inputs.size(); ++rank) {
          read.push_back(to_read(inputs[rank]));
          input_bytes.push_back(num_bytes(inputs[rank]));
          output_bytes.push_back(num_bytes(outputs[rank]));
        }
        const Tensors written = to_write(outputs);
        all_to_all(rounds, pieces_of(read), input_bytes, pieces_of(written), output_bytes);
        put_back(outputs, written);
      });
}

HostBackend::WorkPtr HostBackend::barrier(const c10d::BarrierOptions& options) {
  if (!rounds_) {
    return gloo_->barrier(options);
  }
  const auto type = c10d::OpType::BARRIER;
  return post(
      {type, "barrier", "fastsync:barrier", options.timeout, options.asyncOp, hash_of({static_cast<int64_t>(type)})},
      {}, {}, [](Rounds& rounds) { fastsync::barrier(rounds); });
}

void HostBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  gloo_->monitoredBarrier(options, wait_all_ranks);
}

HostBackend::WorkPtr HostBackend::send(Tensors& tensors, int to, int tag) { return gloo_->send(tensors, to, tag); }

HostBackend::WorkPtr HostBackend::recv(Tensors& tensors, int from, int tag) { return gloo_->recv(tensors, from, tag); }

HostBackend::WorkPtr HostBackend::recvAnysource(Tensors& tensors, int tag) {
  return gloo_->recvAnysource(tensors, tag);
}

}  // namespace fastsync
