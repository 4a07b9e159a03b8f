#include "transport/shared_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <regex>
#include <utility>

namespace fastsync {

namespace {

[[noreturn]] void raise(const char* call, int64_t bytes) {
  TORCH_CHECK(false, call, " of ", bytes, " bytes: ", std::strerror(errno));
}

// No two files that exist at the same time have the same identity.
std::string identity_of(int file, int64_t bytes) {
  struct stat status{};
  TORCH_CHECK(fstat(file, &status) == 0 && status.st_size == bytes, "it has not ", bytes, " bytes");
  return c10::str(" ", status.st_dev, ":", status.st_ino);
}

// With these the memory keeps its size. Otherwise a process that makes it smaller would end all that use it.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Whether it is that of a descriptor of a process. A peer must not have this process open anything else.
bool is_of_descriptor(const std::string& path) {
  static const std::regex descriptor("/proc/[0-9]+/fd/[0-9]+");
  return std::regex_match(path, descriptor);
}

std::string path_of(const std::string& address) { return address.substr(0, address.find(' ')); }

int open_descriptor(const std::string& path) {
  TORCH_CHECK(is_of_descriptor(path), "another process's memory has no path such as ", path);
  return open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

}  // namespace

// The public constructors call this one first. So if they throw, the destructor runs, and closes the file.
SharedMemory::SharedMemory(int file, int64_t bytes) : file_(file), bytes_(bytes), process_id_(getpid()) {}

SharedMemory::SharedMemory(int64_t bytes)
    : SharedMemory(memfd_create("fastsync", MFD_CLOEXEC | MFD_ALLOW_SEALING), bytes) {
  if (file_ < 0) {
    raise("memfd_create", bytes_);
  }
  if (ftruncate(file_, bytes_) != 0) {
    raise("ftruncate", bytes_);
  }
  if (fcntl(file_, F_ADD_SEALS, kSeals) != 0) {
    raise("sealing", bytes_);
  }
  map();
}

// If the process that told the address has ended, the path may lead to another process's file.
SharedMemory::SharedMemory(const std::string& address, int64_t bytes)
    : SharedMemory(open_descriptor(path_of(address)), bytes) {
  const char* const refusal = file_ < 0 ? std::strerror(errno) : "something else is there";
  TORCH_CHECK(
      file_ >= 0 && fcntl(file_, F_GET_SEALS) == kSeals && address == path_of(address) + identity_of(file_, bytes_),
      "open of another process's memory, ", path_of(address), ": ", refusal);
  map();
}

void SharedMemory::map() {
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) {
    raise("mmap", bytes_);
  }
  madvise(mapped, bytes_, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(mapped);
}

void SharedMemory::keep_in_children() const { madvise(data_, bytes_, MADV_DOFORK); }

// A forked child has the file, but not the mapping.
SharedMemory::~SharedMemory() {
  close_file();
  if (data_ != nullptr && getpid() == process_id_) {
    munmap(data_, bytes_);
  }
}

void SharedMemory::close_file() {
  if (file_ >= 0) {
    close(std::exchange(file_, -1));
  }
}

// The path has the process's number in /proc, which may differ from getpid's.
std::string SharedMemory::address() const {
  return c10::str("/proc/", std::filesystem::read_symlink("/proc/self").string(), "/fd/", file_,
                  identity_of(file_, bytes_));
}

// Each call claims only a part, because before Linux 6.11 a signal undoes a call that is under way. A profiler may send
// a signal every few milliseconds.
void SharedMemory::claim(int64_t begin, int64_t end) const {
  constexpr int64_t kBytesOfACall = 4 << 20;
  constexpr int kTries = 100;
  for (int64_t offset = begin; offset < end; offset += kBytesOfACall) {
    int tries = 0;
    while (fallocate(file_, 0, offset, std::min(kBytesOfACall, end - offset)) != 0) {
      if (errno != EINTR || ++tries == kTries) {
        raise("fallocate", end - begin);
      }
    }
  }
}

}  // namespace fastsync
