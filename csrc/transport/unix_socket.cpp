#include "transport/unix_socket.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <set>

namespace fastsync {

namespace {

struct OpenDescriptors {
  std::mutex mutex;
  std::set<int> numbers;
};

OpenDescriptors& open_descriptors() {
  static auto& all = *[] {
    auto* made = new OpenDescriptors();
    pthread_atfork([] { open_descriptors().mutex.lock(); }, [] { open_descriptors().mutex.unlock(); },
                   [] {
                     for (const int number : open_descriptors().numbers) {
                       close(number);
                     }
                     open_descriptors().numbers.clear();
                     open_descriptors().mutex.unlock();
                   });
    return made;
  }();
  return all;
}

[[noreturn]] void raise(const char* what) { TORCH_CHECK(false, what, ": ", std::strerror(errno)); }

Descriptor new_socket() {
  Descriptor made(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.is_open()) {
    raise("a socket between processes of this host could not be made");
  }
  return made;
}

// The name is behind a zero, so that it stands in no file system.
std::pair<sockaddr_un, socklen_t> socket_address(const std::string& address) {
  const std::string name = "fastsync-" + address;
  sockaddr_un made{};
  made.sun_family = AF_UNIX;
  TORCH_CHECK(name.size() + 1 <= sizeof(made.sun_path), "the address of a socket is too long: ", name);
  std::copy(name.begin(), name.end(), made.sun_path + 1);
  return {made, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

void wait_for_input(int number, Deadline deadline, const char* what) {
  using std::chrono::milliseconds;
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd polled{number, POLLIN, 0};
    const int ready = poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 60'000)));
    if (ready > 0) {
      return;
    }
    if (ready < 0 && errno != EINTR) {
      raise(what);
    }
    TORCH_CHECK(left.count() > 0, what, ": nothing came in time");
  }
}

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

}  // namespace

Descriptor::Descriptor(int number) : number_(number) {
  if (is_open()) {
    const std::lock_guard<std::mutex> lock(open_descriptors().mutex);
    open_descriptors().numbers.insert(number);
  }
}

// Not in a child, where it was closed: the number may be another file's.
Descriptor::~Descriptor() {
  if (is_open()) {
    const std::lock_guard<std::mutex> lock(open_descriptors().mutex);
    if (open_descriptors().numbers.erase(number_) != 0) {
      close(number_);
    }
  }
}

Connection Connection::to(const std::string& address) {
  Descriptor made = new_socket();
  const auto [name, length] = socket_address(address);
  if (connect(made.number(), reinterpret_cast<const sockaddr*>(&name), length) != 0) {
    if (errno == ECONNREFUSED) {
      return Connection();
    }
    raise("no connection on this host");
  }
  Connection connection(std::move(made));
  TORCH_CHECK(connection.is_same_user(), "the process at the other end belongs to another user");
  return connection;
}

bool Connection::is_same_user() const {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return getsockopt(socket_.number(), SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

void Connection::send(const std::string& text, const Descriptor& descriptor) const {
  TORCH_INTERNAL_ASSERT(!text.empty() && text.size() <= kLongest);
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  Control control{};
  if (descriptor.is_open()) {
    message.msg_control = &control;
    message.msg_controllen = sizeof(control);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    const int number = descriptor.number();
    std::memcpy(CMSG_DATA(&control.header), &number, sizeof(int));
  }
  if (sendmsg(socket_.number(), &message, MSG_NOSIGNAL) < 0) {
    raise("a message to another process of this host could not be sent");
  }
}

Connection::Message Connection::receive(Deadline deadline) const {
  constexpr const char* kWhat = "waiting for a message from another process of this host";
  wait_for_input(socket_.number(), deadline, kWhat);
  std::array<char, kLongest> text;
  iovec part{text.data(), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  Control control{};
  message.msg_control = &control;
  message.msg_controllen = sizeof(control);
  const ssize_t length = recvmsg(socket_.number(), &message, MSG_CMSG_CLOEXEC);
  if (length < 0) {
    raise(kWhat);
  }
  Message received{std::string(text.data(), static_cast<size_t>(length)), Descriptor()};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof(int));
    received.descriptor = Descriptor(number);
  }
  TORCH_CHECK(length > 0, kWhat, ": it has ended");
  return received;
}

bool Connection::has_ended() const {
  pollfd polled{socket_.number(), POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0 && (polled.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

Listener::Listener() : address_(random_text()), socket_(new_socket()) {
  constexpr int kBacklog = 4096;
  const auto [name, length] = socket_address(address_);
  if (bind(socket_.number(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      listen(socket_.number(), kBacklog) != 0) {
    raise("a socket for processes of this host could not be opened");
  }
}

Connection Listener::accept(Deadline deadline) const {
  constexpr const char* kWhat = "waiting for a connection of another process of this host";
  wait_for_input(socket_.number(), deadline, kWhat);
  Descriptor accepted(accept4(socket_.number(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!accepted.is_open()) {
    raise(kWhat);
  }
  return Connection(std::move(accepted));
}

std::string random_text() {
  constexpr const char* kDigits = "0123456789abcdef";
  std::array<unsigned char, kRandomLength / 2> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    raise("the system gave no random numbers");
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    text += {kDigits[byte / 16], kDigits[byte % 16]};
  }
  return text;
}

}  // namespace fastsync
