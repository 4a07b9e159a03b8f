#include "transport/shared_memory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

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
int new_memory() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const int made = memfd_create("fastsync", flags | MFD_NOEXEC_SEAL);
  return made >= 0 || errno != EINVAL ? made : memfd_create("fastsync", flags);
}

}  // namespace

Descriptor SharedMemory::make(int64_t bytes) {
  Descriptor memory(new_memory());
  if (!memory.is_open()) {
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

SharedMemory::SharedMemory(const Descriptor& memory, int64_t bytes) : bytes_(bytes), process_id_(getpid()) {
  struct stat status{};
  TORCH_CHECK(fstat(memory.number(), &status) == 0 && status.st_size == bytes &&
                  (fcntl(memory.number(), F_GET_SEALS) & kSeals) == kSeals,
              "another process handed over something else than ", bytes, " bytes of memory");
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
