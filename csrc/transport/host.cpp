#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "transport/agreement.h"

namespace fastsync {

namespace {

using Group = Host::Group;

constexpr int64_t kLongestText = 512;

// Not every rank could do its part, and all have heard why.
struct CannotShare {
  std::string why;
};

// What the call throws, as text; empty where it throws nothing.
std::string failure_of(const std::function<void()>& call) {
  try {
    call();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Every rank does its part, and hears what each rank has to tell. All throw CannotShare where one has thrown.
std::vector<std::string> vote(const Group& group, const std::function<void(std::string& told)>& part) {
  std::string text;
  const std::string failure = failure_of([&] { part(text); });
  text = failure.empty() ? "+" + text : "-" + failure;
  std::vector<std::string> found = gather_texts(group, text.substr(0, kLongestText - 1), kLongestText, c10::kCPU);
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].front() == '-') {
      throw CannotShare{c10::str("rank ", rank, ": ", found[rank].substr(1))};
    }
    found[rank].erase(0, 1);
  }
  return found;
}

bool is_on() {
  const char* const value = std::getenv("FASTSYNC_SHARED_MEMORY");
  const std::string setting = value == nullptr ? "" : value;
  TORCH_CHECK_VALUE(setting.empty() || setting == "0" || setting == "1",
                    "fastsync: FASTSYNC_SHARED_MEMORY: expected 0 or 1, got '", setting, "'");
  return setting != "0";
}

// A file that shows that this process can share memory.
Descriptor try_memory() {
  TORCH_CHECK(is_on(), "FASTSYNC_SHARED_MEMORY=0");
  Descriptor memory = SharedMemory::make(1);
  const SharedMemory shared(memory, 1);
  shared.check_room();
  shared.claim(memory, 0, 1);
  return memory;
}

// The same for processes that find each other's memory in /proc. Those of several network namespaces could, too, but
// are meant to be apart.
std::string name_of_host() {
  std::string name;
  TORCH_CHECK(std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), name), "the machine has no boot_id");
  for (const char* const space : {"/proc/self/ns/pid", "/proc/thread-self/ns/net"}) {
    name += " " + std::filesystem::read_symlink(space).string();
  }
  return c10::str(name, " user ", geteuid());
}

int64_t first_byte_of(int64_t place, int64_t size, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return place == size ? bytes : bytes / size * place / page * page;
}

}  // namespace

void Host::check_setting() { is_on(); }

std::string Host::obstacle() {
  return failure_of([] { SharedMemory::address_of(try_memory()); });
}

// See Note [Sharing memory with processes that nobody forked].
Host::Host(const Group& group) {
  try {
    const auto names = vote(group, [](std::string& told) { told = name_of_host(); });
    for (int64_t rank = 0; rank < group->getSize(); ++rank) {
      const auto is_of_it = [&](const Ranks& ranks) { return names[ranks.front()] == names[rank]; };
      const auto host = std::find_if(hosts_.begin(), hosts_.end(), is_of_it);
      if (rank == group->getRank()) {
        place_ = host - hosts_.begin();
      }
      host == hosts_.end() ? hosts_.push_back({rank}) : host->push_back(rank);
    }
    if (hosts_.size() == names.size()) {
      throw CannotShare{"no two ranks are on one host, in one network namespace"};
    }
    presences_ = vote(group, [&](std::string& told) {
      presence_ = try_memory();
      told = SharedMemory::address_of(presence_);
    });
    vote(group, [&](std::string& /*told*/) {
      for (const int64_t rank : ranks()) {
        SharedMemory::open(presences_[rank]);
      }
    });
  } catch (const CannotShare& failure) {
    why_not_ = failure.why;
    hosts_.clear();
    presence_ = Descriptor();
  }
}

std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes, std::string& why_not) const {
  const int64_t rank = group->getRank();
  const bool is_first = rank == ranks().front();
  try {
    Descriptor memory;
    const auto addresses = vote(group, [&](std::string& told) {
      if (is_first) {
        memory = SharedMemory::make(bytes);
        told = SharedMemory::address_of(memory);
      }
    });
    std::shared_ptr<SharedMemory> shared;
    vote(group, [&](std::string& /*told*/) {
      if (!is_first) {
        memory = SharedMemory::open(addresses[ranks().front()]);
      }
      shared = std::make_shared<SharedMemory>(memory, bytes);
      shared->check_room();
    });
    vote(group, [&](std::string& /*told*/) {
      const auto size = static_cast<int64_t>(ranks().size());
      const int64_t place = std::find(ranks().begin(), ranks().end(), rank) - ranks().begin();
      shared->claim(memory, first_byte_of(place, size, bytes), first_byte_of(place + 1, size, bytes));
    });
    return shared;
  } catch (const CannotShare& failure) {
    why_not = failure.why;
    return nullptr;
  }
}

std::vector<Host::Ranks> hosts_of(const Group& group) {
  if (group->getSize() == 1 || group->getBackend(c10::kCPU)->getBackendName() != "gloo") {
    return {};
  }
  return Host(group).hosts();
}

}  // namespace fastsync
