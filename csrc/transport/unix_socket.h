// Connections between processes of one host, over which they hand each other memory. They end with the process, however
// it ends, and the other side notices.
#pragma once

#include <chrono>
#include <string>
#include <utility>

namespace fastsync {

using Deadline = std::chrono::steady_clock::time_point;

// Closed with its owner, and in a child that is forked: which would keep a connection alive that has lost its process.
class Descriptor {
 public:
  explicit Descriptor(int number = -1);
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  bool is_open() const { return number_ >= 0; }
  int number() const { return number_; }

 private:
  int number_;
};

// All of this throws c10::Error, with the system's reason.
class Connection {
 public:
  struct Message {
    std::string text;
    Descriptor descriptor;  // of the sender's, here too; not open where none came
  };

  Connection() = default;
  explicit Connection(Descriptor socket) : socket_(std::move(socket)) {}

  // To a listener, of the same user's, which need not have accepted it yet. Not open where there is none.
  static Connection to(const std::string& address);

  bool is_open() const { return socket_.is_open(); }
  bool is_same_user() const;
  // Texts of at most kLongest bytes.
  void send(const std::string& text, const Descriptor& descriptor = Descriptor()) const;
  Message receive(Deadline deadline) const;
  // Whether the other process has ended or has closed it.
  bool has_ended() const;

  static constexpr size_t kLongest = 256;

 private:
  Descriptor socket_;
};

// At a random name in the network namespace: nothing is left in any file system.
class Listener {
 public:
  Listener();

  const std::string& address() const { return address_; }
  Connection accept(Deadline deadline) const;

 private:
  std::string address_;
  Descriptor socket_;
};

// So many hexadecimal digits that nobody could guess.
constexpr size_t kRandomLength = 32;
std::string random_text();

}  // namespace fastsync
