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
#include <fstream>
#include <random>
#include <system_error>

#include "transport/cgroup.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace fastsync {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void raise(const char* call, int64_t bytes) {
  TORCH_CHECK(false, call, " of ", bytes, " bytes: ", std::strerror(errno));
}

// Some systems ask for the flag, and old ones do not know it.
int new_memory(const std::string& name) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int made = memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL);
  return made >= 0 || errno != EINVAL ? made : memfd_create(name.c_str(), flags);
}

std::string random_name() {
  std::random_device random;
  return c10::str("fastsync-", random(), "-", random(), "-", random(), "-", random());
}

// The system makes it of the name that the memory was given. Empty where there is no such file.
std::string name_at(const std::string& path, std::error_code& error) {
  return std::filesystem::read_symlink(path, error).string();
}

// An address is a path in /proc and, behind a space, the name that is found there.
std::pair<std::string, std::string> path_and_name(const std::string& address) {
  const size_t space = address.find(' ');
  return {address.substr(0, space), address.substr(space + 1)};
}

// One that has ended and that nobody has waited for yet. Its files may be looked at by root alone.
bool has_ended(const std::string& path) {
  std::ifstream file(path.substr(0, path.find("/fd/")) + "/stat");
  std::string status;
  std::getline(file, status);
  const size_t name_end = status.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= status.size() || status[name_end + 2] == 'Z' ||
         status[name_end + 2] == 'X';
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    close(number_);
  }
}

Descriptor SharedMemory::make(int64_t bytes) {
  Descriptor memory(new_memory(random_name()));
  if (memory.number() < 0) {
    raise("memfd_create", bytes);
  }
  if (ftruncate(memory.number(), bytes) != 0) {
    raise("ftruncate", bytes);
  }
  if (fcntl(memory.number(), F_ADD_SEALS, kSeals) != 0) {
    raise("fcntl(F_ADD_SEALS)", bytes);
  }
  return memory;
}

// The process by its number in /proc, which need not be the one that getpid gives.
std::string SharedMemory::address_of(const Descriptor& memory) {
  const std::string process = std::filesystem::read_symlink("/proc/self").string();
  const std::string path = c10::str("/proc/", process, "/fd/", memory.number());
  return c10::str(path, " ", std::filesystem::read_symlink(path).string());
}

// What stands at the path may be another process's, if the one that told the address has ended.
Descriptor SharedMemory::open(const std::string& address) {
  const auto [path, name] = path_and_name(address);
  Descriptor opened(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  TORCH_CHECK(opened.number() >= 0, "open of another process's memory, ", path, ": ", std::strerror(errno));
  std::error_code error;
  TORCH_CHECK(name_at(c10::str("/proc/self/fd/", opened.number()), error) == name, "open of another process's memory, ",
              path, ": something else is there");
  return opened;
}

// A process that may no more be looked at has not ended.
bool SharedMemory::is_open_at(const std::string& address) {
  const auto [path, name] = path_and_name(address);
  std::error_code error;
  return name_at(path, error) == name || (error == std::errc::permission_denied && !has_ended(path));
}

SharedMemory::SharedMemory(const Descriptor& memory, int64_t bytes) : bytes_(bytes), process_id_(getpid()) {
  struct stat status{};
  TORCH_CHECK(fstat(memory.number(), &status) == 0 && status.st_size == bytes &&
                  (fcntl(memory.number(), F_GET_SEALS) & kSeals) == kSeals,
              "another process has something else than ", bytes, " bytes of memory");
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.number(), 0);
  if (mapped == MAP_FAILED) {
    raise("mmap", bytes);
  }
  madvise(mapped, bytes, MADV_DONTFORK);
  data_ = static_cast<std::byte*>(mapped);
}

// A child that was forked does not have it.
SharedMemory::~SharedMemory() {
  if (getpid() == process_id_) {
    munmap(data_, bytes_);
  }
}

void SharedMemory::check_room() const {
  const int64_t left = memory_left_in_cgroups();
  TORCH_CHECK(bytes_ <= left, "the memory cgroup has ", left, " bytes left, and ", bytes_, " are needed");
}

// In pieces: before Linux 6.11 a signal, such as a profiler's every few milliseconds, undoes a call that is under way.
void SharedMemory::claim(const Descriptor& memory, int64_t begin, int64_t end) const {
  constexpr int64_t kPiece = 4 << 20;
  constexpr int kTries = 100;
  for (int64_t piece = begin; piece < end; piece += kPiece) {
    int tries = 0;
    while (fallocate(memory.number(), 0, piece, std::min(kPiece, end - piece)) != 0) {
      if (errno != EINTR || ++tries == kTries) {
        raise("fallocate", end - begin);
      }
    }
  }
}

}  // namespace fastsync
