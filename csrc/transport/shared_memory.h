// Memory that processes of one host have in common. It has no name, and is gone with the last process that has it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "transport/unix_socket.h"

namespace fastsync {

// All of this throws c10::Error, with the system's reason.
class SharedMemory {
 public:
  // So many bytes of zeros, for which there need not be memory yet. Nobody can make it smaller.
  static Descriptor make(int64_t bytes);

  // Maps what make gave to this process or another one; refuses what is not of that kind and size.
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
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  int64_t bytes_;
  pid_t process_id_;
};

}  // namespace fastsync
