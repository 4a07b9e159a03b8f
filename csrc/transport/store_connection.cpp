#include "transport/store_connection.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace fastsync {
namespace {

using StorePtr = StoreConnection::StorePtr;

// Returns the store that prefixes may be around, or null if it is of another kind.
template <class Kind>
const Kind* as(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return dynamic_cast<const Kind*>(prefixed == nullptr ? store.get() : prefixed->getUnderlyingNonPrefixStore().get());
}

// An address and a port. An IPv4 address is written as an IPv6 one, as getpeername may give it.
using Endpoint = std::pair<std::array<uint8_t, 16>, uint16_t>;

std::optional<Endpoint> endpoint_of(const sockaddr* address) {
  Endpoint endpoint;
  if (address->sa_family == AF_INET) {
    const auto* const in = reinterpret_cast<const sockaddr_in*>(address);
    endpoint.first[10] = endpoint.first[11] = 0xFF;
    std::memcpy(&endpoint.first[12], &in->sin_addr, sizeof(in->sin_addr));
    endpoint.second = ntohs(in->sin_port);
  } else if (address->sa_family == AF_INET6) {
    const auto* const in = reinterpret_cast<const sockaddr_in6*>(address);
    std::memcpy(endpoint.first.data(), &in->sin6_addr, sizeof(in->sin6_addr));
    endpoint.second = ntohs(in->sin6_port);
  } else {
    return std::nullopt;
  }
  return endpoint;
}

// Where a server of this name may be. A name may have several addresses.
std::vector<Endpoint> endpoints_of(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::vector<Endpoint> endpoints;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return endpoints;
  }
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (const auto endpoint = endpoint_of(each->ai_addr)) {
      endpoints.push_back(*endpoint);
    }
  }
  freeaddrinfo(found);
  return endpoints;
}

bool is_connected_to(const std::vector<Endpoint>& servers, int socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(socket, address, &length) != 0) {
    return false;
  }
  const auto endpoint = endpoint_of(address);
  return endpoint && std::ranges::find(servers, *endpoint) != servers.end();
}

bool is_open(int socket) {
  pollfd hung_up{socket, POLLRDHUP, 0};
  return poll(&hung_up, 1, /*timeout=*/0) == 0;
}

// Returns a second descriptor of one of this process's connections to the store's server; below 0 if there is none.
// TCPStore does not tell which socket is its own, and one connection more for each rank could exceed the server's
// limit.
int find_connection_to(const c10d::TCPStore& store) {
  const std::vector<Endpoint> servers = endpoints_of(store.getHost(), store.getPort());
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(file.path().filename());
    if (is_connected_to(servers, descriptor) && is_open(descriptor)) {
      return fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    }
  }
  return -1;
}

}  // namespace

bool StoreConnection::can_use(const StorePtr& store) {
  return as<c10d::TCPStore>(store) != nullptr || as<c10d::FileStore>(store) != nullptr;
}

StoreConnection::StoreConnection(const StorePtr& store)
    : group_store_(store), is_file_(as<c10d::FileStore>(store) != nullptr) {
  if (const auto* const tcp = as<c10d::TCPStore>(store)) {
    server_ = find_connection_to(*tcp);
    try {
      client_ = store->clone();
    } catch (const std::exception&) {  // the group's own connection has to do
    }
  }
}

StoreConnection::~StoreConnection() {
  if (server_ >= 0) {
    close(server_);
  }
}

// A TCPStore warns, with a stack trace, if its server has ended. That happens at the end of a job whose rank 0 holds
// the store and ends first.
StorePtr StoreConnection::store() const {
  StorePtr store = client_ ? client_ : group_store_.lock();
  TORCH_CHECK(store && (is_file_ || (server_ >= 0 && is_open(server_))), "the store is gone");
  return store;
}

std::vector<std::string> StoreConnection::get(const std::vector<std::string>& keys) const {
  const StorePtr from = store();
  if (!from->check(keys)) {
    for (const std::string& key : keys) {
      from->compareSet(key, std::string(), std::string());  // because multiGet waits for keys that nobody has set
    }
  }
  std::vector<std::string> values;
  for (const auto& bytes : from->multiGet(keys)) {
    values.emplace_back(bytes.begin(), bytes.end());
  }
  return values;
}

}  // namespace fastsync
