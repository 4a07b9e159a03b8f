#include "transport/unix_socket.h"

#include <c10/util/Exception.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <random>

namespace fastsync {

namespace {

constexpr int kMostConnections = 4096;  // that wait to be accepted

[[noreturn]] void raise(const char* what) { TORCH_CHECK(false, what, ": ", std::strerror(errno)); }

Descriptor new_socket() {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.is_open()) {
    raise("a socket between processes of this host could not be made");
  }
  return made;
}

// Calls bind or connect. The name is behind a zero, so that it stands in no file system.
template <class Call>
bool call_with_address(Call call, const Descriptor& socket, const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  TORCH_INTERNAL_ASSERT(name.size() + 1 <= sizeof(address.sun_path));
  std::copy(name.begin(), name.end(), address.sun_path + 1);
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return call(socket.number(), reinterpret_cast<const sockaddr*>(&address), length) == 0;
}

bool is_same_user(const Descriptor& connection) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(connection.number(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

// A message of one byte, beside which a descriptor travels.
struct DescriptorMessage {
  DescriptorMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }

  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

}  // namespace

Descriptor::~Descriptor() {
  if (is_open()) {
    close(number_);
  }
}

std::string random_name() {
  std::random_device random;
  return c10::str("fastsync-", random(), "-", random(), "-", random(), "-", random());
}

Descriptor listen_at(const std::string& name) {
  Descriptor listener = new_socket();
  if (!call_with_address(bind, listener, name) || listen(listener.number(), kMostConnections) != 0) {
    raise("a socket for processes of this host could not be opened");
  }
  return listener;
}

Descriptor connect_to(const std::string& name) {
  Descriptor connection = new_socket();
  if (!call_with_address(connect, connection, name)) {
    if (errno == ECONNREFUSED) {
      return Descriptor();
    }
    raise("no connection on this host");
  }
  TORCH_CHECK(is_same_user(connection), "the process at the other end belongs to another user");
  return connection;
}

std::vector<Descriptor> accept_all(const Descriptor& listener) {
  std::vector<Descriptor> connections;
  for (int i = 0; i < kMostConnections; ++i) {
    Descriptor accepted(accept4(listener.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!accepted.is_open()) {
      break;
    }
    if (is_same_user(accepted)) {
      connections.push_back(std::move(accepted));
    }
  }
  return connections;
}

// Whoever does not get it says so.
void send_descriptor(const Descriptor& connection, const Descriptor& sent) {
  DescriptorMessage message;
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = sent.number();
  std::memcpy(CMSG_DATA(control), &number, sizeof(int));
  sendmsg(connection.number(), &message.header, MSG_NOSIGNAL);
}

Descriptor receive_descriptor(const Descriptor& connection) {
  Descriptor newest;
  for (;;) {
    DescriptorMessage message;
    if (recvmsg(connection.number(), &message.header, MSG_CMSG_CLOEXEC) <= 0) {
      TORCH_CHECK(newest.is_open(), "another process of this host has not handed over its memory");
      return newest;
    }
    const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
    if (control != nullptr && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(control), sizeof(int));
      newest = Descriptor(number);
    }
  }
}

}  // namespace fastsync
