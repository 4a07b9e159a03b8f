#include "backend/hosts.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <numeric>
#include <thread>
#include <utility>

#include "backend/tensors.h"
#include "transport/agreement.h"

namespace fastsync {

namespace {

const char* const kReason = "failure";
// How much longer the ranks of a host wait for the first one, which waits for other hosts meanwhile.
constexpr std::chrono::seconds kGrace(5);
// How long a rank whose connections have broken looks why. Ranks notice within it that one of their host has ended.
constexpr std::chrono::seconds kAskFor(2);

at::Tensor new_bytes(int64_t count) { return at::empty({count}, at::kByte); }

// The tensor's memory, which has to live as long as this.
at::Tensor memory_of(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {num_bytes(tensor)}, at::kByte);
}

}  // namespace

Hosts::Hosts(std::shared_ptr<const Host> host, std::shared_ptr<Rounds> rounds, Gloo between, StorePtr store)
    : host_(std::move(host)),
      rounds_(std::move(rounds)),
      between_(std::move(between)),
      store_(std::move(store)),
      size_(std::accumulate(
          host_->hosts().begin(), host_->hosts().end(), int64_t{0},
          [](int64_t sum, const Host::Ranks& ranks) { return sum + static_cast<int64_t>(ranks.size()); })),
      own_(std::find(host_->hosts().begin(), host_->hosts().end(), host_->ranks()) - host_->hosts().begin()) {}

void Hosts::fail(const std::string& why) {
  rounds_->fail(why);
  if (count() == 1) {
    return;
  }
  try {
    if (!store_->check({kReason})) {
      store_->set(kReason, why);
    }
  } catch (const std::exception&) {  // the store may have been lost with the rank
  }
  if (between_) {
    close_connections(*between_);
  }
}

void Hosts::abort() {
  rounds_->abort();
  if (between_) {
    close_connections(*between_);
  }
}

void Hosts::meet(const Meeting& meeting) {
  rounds_->wait_longer(kGrace);
  if (!is_first()) {
    return;
  }
  try {
    meeting(*between_)->wait();
  } catch (const std::exception& error) {
    std::string others;
    for (int64_t host = 0; host < count(); ++host) {
      others += host == own_ ? "" : c10::str(others.empty() ? "" : ", ", host_->hosts()[host].front());
    }
    std::string said = error.what();
    said.resize(std::min(said.size(), said.find('\n')));
    const std::string reason = reason_of_another_host();
    TORCH_CHECK_WITH(DistBackendError, false, "fastsync: ", rounds_->collective().name, ": ",
                     reason.empty() ? c10::str("lost the first rank of another host (", others, ")") : reason, ": ",
                     said);
  }
}

std::string Hosts::reason_of_another_host() const {
  try {
    const auto deadline = Waiting::Clock::now() + kAskFor;
    while (!store_->check({kReason})) {
      if (Waiting::Clock::now() > deadline) {
        return "";
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return store_->get_to_str(kReason);
  } catch (const std::exception&) {
    return "";
  }
}

void Hosts::barrier() {
  fastsync::barrier(*rounds_);
  if (count() > 1) {
    meet([this](c10d::Backend& between) {
      c10d::BarrierOptions options;
      options.timeout = rounds_->collective().timeout;
      return between.barrier(options);
    });
    fastsync::barrier(*rounds_);
  }
}

void Hosts::broadcast(const at::Tensor& data, int64_t root) {
  if (data.numel() == 0) {
    return;
  }
  const auto& hosts = host_->hosts();
  const auto host = std::ranges::find_if(
      hosts, [root](const Host::Ranks& ranks) { return std::ranges::find(ranks, root) != ranks.end(); });
  if (host - hosts.begin() == own_) {
    const auto local_root = std::ranges::find(*host, root) - host->begin();
    fastsync::broadcast(*rounds_, bytes_of(data), num_bytes(data), local_root);
  }
  if (count() == 1) {
    return;
  }
  meet([&](c10d::Backend& between) {
    c10d::BroadcastOptions options;
    options.timeout = rounds_->collective().timeout;
    options.rootRank = host - hosts.begin();
    std::vector<at::Tensor> tensors{memory_of(data)};
    return between.broadcast(tensors, options);
  });
  if (host - hosts.begin() != own_) {
    fastsync::broadcast(*rounds_, bytes_of(data), num_bytes(data), 0);
  }
}

void Hosts::all_reduce(const at::Tensor& data, const Reducing& reducing) {
  if (count() == 1) {
    fastsync::all_reduce(*rounds_, bytes_of(data), num_bytes(data), reducing.function);
    return;
  }
  if (data.numel() == 0) {
    return;
  }
  fastsync::reduce(*rounds_, bytes_of(data), num_bytes(data), reducing.function, 0);
  meet([&](c10d::Backend& between) {
    c10d::AllreduceOptions options;
    options.timeout = rounds_->collective().timeout;
    options.reduceOp = reducing.op == c10d::ReduceOp::AVG ? c10d::ReduceOp::SUM : reducing.op;
    std::vector<at::Tensor> tensors{data.is_complex() ? at::view_as_real(data) : data};
    return between.allreduce(tensors, options);
  });
  fastsync::broadcast(*rounds_, bytes_of(data), num_bytes(data), 0);
}

// The first rank of a host adds up all pieces of its host, sends each host those of its ranks, and adds up what comes.
// Not by Gloo's reduce-scatter, which is an all-reduce for each rank.
void Hosts::reduce_scatter(const Pieces& pieces, const at::Tensor& output, const Reducing& reducing) {
  const int64_t bytes = num_bytes(output);
  if (count() == 1) {
    fastsync::reduce_scatter(*rounds_, pieces, bytes_of(output), bytes, reducing.function);
    return;
  }
  if (bytes == 0) {
    return;
  }
  const int64_t own_bytes = rounds_->size() * bytes;
  const at::Tensor sums = is_first() ? new_bytes(size_ * bytes) : at::Tensor();
  std::vector<int64_t> splits;
  int64_t place = 0;
  for (const Host::Ranks& ranks : host_->hosts()) {
    splits.push_back(static_cast<int64_t>(ranks.size()) * bytes);
    for (const int64_t rank : ranks) {
      std::byte* const sum = is_first() ? bytes_of(sums) + place++ * bytes : pieces[rank];
      if (is_first()) {
        std::memcpy(sum, pieces[rank], bytes);
      }
      fastsync::reduce(*rounds_, sum, bytes, reducing.function, 0);
    }
  }
  const at::Tensor of_hosts = is_first() ? new_bytes(count() * own_bytes) : at::Tensor();
  meet([&](c10d::Backend& between) {
    c10d::AllToAllOptions options;
    options.timeout = rounds_->collective().timeout;
    std::vector<int64_t> from(count(), own_bytes);
    at::Tensor to = of_hosts;
    at::Tensor mine = sums;
    return between.alltoall_base(to, mine, from, splits, options);
  });
  Pieces reduced;
  if (is_first()) {
    std::byte* const sum = bytes_of(of_hosts);
    for (int64_t host = 1; host < count(); ++host) {
      reducing.function(sum, sum + host * own_bytes, sum, own_bytes);
    }
    for (int64_t rank = 0; rank < rounds_->size(); ++rank) {
      reduced.push_back(sum + rank * bytes);
    }
  }
  fastsync::scatter(*rounds_, reduced, bytes_of(output), bytes, 0);
}

void Hosts::all_gather(const at::Tensor& input, const Pieces& outputs) {
  const int64_t bytes = num_bytes(input);
  if (bytes == 0) {
    return;
  }
  Pieces of_host;
  for (const int64_t rank : host_->ranks()) {
    of_host.push_back(outputs[rank]);
  }
  fastsync::all_gather(*rounds_, bytes_of(input), of_host, bytes);
  if (count() == 1) {
    return;
  }
  const auto& hosts = host_->hosts();
  const size_t most = std::ranges::max_element(hosts, {}, &Host::Ranks::size)->size();
  const auto row = static_cast<int64_t>(most) * bytes;  // of a host, with a gap at its end if it has fewer ranks
  const at::Tensor rows = is_first() ? new_bytes(count() * row) : at::Tensor();
  meet([&](c10d::Backend& between) {
    at::Tensor all = rows;
    at::Tensor own = new_bytes(row);
    for (size_t i = 0; i < of_host.size(); ++i) {
      std::memcpy(bytes_of(own) + static_cast<int64_t>(i) * bytes, of_host[i], bytes);
    }
    c10d::AllgatherOptions options;
    options.timeout = rounds_->collective().timeout;
    return between._allgather_base(all, own, options);
  });
  for (int64_t host = 0; host < count(); ++host) {
    for (size_t i = 0; host != own_ && i < hosts[host].size(); ++i) {
      std::byte* const output = outputs[hosts[host][i]];
      if (is_first()) {
        std::memcpy(output, bytes_of(rows) + host * row + static_cast<int64_t>(i) * bytes, bytes);
      }
      fastsync::broadcast(*rounds_, output, bytes, 0);
    }
  }
}

}  // namespace fastsync
