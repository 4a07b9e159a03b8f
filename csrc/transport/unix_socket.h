// Sockets over which processes of one user on one host hand each other memory. None of this waits: whoever expects
// something has heard before, through the process group, that it is there.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace fastsync {

// A file of this process, closed with its owner.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
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

// A name that no other host has. It stands in the network namespace and in no file system, so nothing is left of it.
std::string random_name();
Descriptor listen_at(const std::string& name);

// Not open where nobody listens in this network namespace. Throws where another user does.
Descriptor connect_to(const std::string& name);

// The connections that have come since, but for those of other users.
std::vector<Descriptor> accept_all(const Descriptor& listener);

// The other side gets a file of its own for what is sent, unless it has ended.
void send_descriptor(const Descriptor& connection, const Descriptor& sent);

// The newest. What came before it was of an attempt that failed.
Descriptor receive_descriptor(const Descriptor& connection);

}  // namespace fastsync
