// Memory that processes of one user on one host have in common. It has no name in a file system, and is gone with the
// last process that has it.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastsync {

// All of this throws c10::Error, with the system's reason.
class SharedMemory {
 public:
  // So many bytes of zeros, for which there need not be memory yet.
  explicit SharedMemory(int64_t bytes);
  // What another process has made, by its address. The system lets no other user's process do that.
  SharedMemory(const std::string& address, int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Where other processes of this host find it until this one closes its file, and which file they have to find.
  std::string address() const;
  // Has the system find memory for these bytes, near the core that runs this. Where there is none, it says so here: not
  // by a signal, later.
  void claim(int64_t begin, int64_t end) const;
  // The memory stays. A file that stays open would come along into each child that is forked.
  void close_file();

  std::byte* data() const { return data_; }

 private:
  SharedMemory(int file, int64_t bytes);
  void map();

  int file_;  // below 0 where there is none
  int64_t bytes_;
  std::byte* data_ = nullptr;
  pid_t process_id_;
};

}  // namespace fastsync
