#include "transport/store_connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
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

// IPv4's and IPv6's addresses have the port at the same offset.
bool is_connected_to(uint16_t port, int socket) {
  sockaddr_in6 peer{};
  socklen_t length = sizeof(peer);
  return getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && ntohs(peer.sin6_port) == port;
}

bool is_open(int socket) {
  pollfd hung_up{socket, POLLRDHUP, 0};
  return poll(&hung_up, 1, /*timeout=*/0) == 0;
}

// Returns a second descriptor of one of this process's connections to the server on the port; below 0 if there is none.
// TCPStore does not tell which socket is its own, and one connection more for each rank could exceed the server's
// limit.
int find_connection_to(uint16_t port) {
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int descriptor = std::stoi(file.path().filename());
    if (is_connected_to(port, descriptor) && is_open(descriptor)) {
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
    server_ = find_connection_to(tcp->getPort());
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
