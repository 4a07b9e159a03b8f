// Processes of one user on one host share this memory. It has no name in a file system, and is freed when the last
// process that has it ends.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace fastsync {

// All methods throw c10::Error, with the system's reason.
class SharedMemory {
 public:
  // Makes so many bytes of zeros. The system need not have memory for them before claim.
  explicit SharedMemory(int64_t bytes);
  // Opens what another process has made, by its address. The system lets no other user's process do that.
  SharedMemory(const std::string& address, int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The path by which other processes of this host open the memory, until close_file, and the file's identity.
  std::string address() const;
  // Makes the system find memory for these bytes, near the core that runs this. If there is none, claim throws here,
  // where otherwise a signal would end the process later.
  void claim(int64_t begin, int64_t end) const;
  // Closes the file, which would also be open in each child that is forked. The memory stays.
  void close_file();

  // Lets children that are forked have the memory, which they share with all others.
  void keep_in_children() const;

  std::byte* data() const { return data_; }

 private:
  SharedMemory(int file, int64_t bytes);
  void map();

  int file_;  // below 0 once it is closed
  int64_t bytes_;
  std::byte* data_ = nullptr;
  pid_t process_id_;
};

}  // namespace fastsync
