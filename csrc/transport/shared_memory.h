// Memory that processes of one user on one host have in common. It has no name in a file system, and is gone with the
// last process that has it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

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

  int number() const { return number_; }

 private:
  int number_;
};

// All of this throws c10::Error, with the system's reason.
class SharedMemory {
 public:
  // So many bytes of zeros, for which there need not be memory yet. Nobody can change the size.
  static Descriptor make(int64_t bytes);
  // Where other processes of this host find it while this one has it open.
  static std::string address_of(const Descriptor& memory);
  // The system lets no other user's process do that.
  static Descriptor open(const std::string& address);
  // Whether its process still has it open.
  static bool is_open_at(const std::string& address);

  // Maps what make or open gave; refuses what is not of that kind and size.
  SharedMemory(const Descriptor& memory, int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Throws where the memory cgroup has not room for all of it: before anybody claims a part, for a system that runs out
  // of memory kills.
  void check_room() const;
  // Has the system find memory for these bytes, near the core that runs this. Where there is none, it says so here: not
  // by a signal, later.
  void claim(const Descriptor& memory, int64_t begin, int64_t end) const;

  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
  int64_t bytes_;
  pid_t process_id_;
};

}  // namespace fastsync
