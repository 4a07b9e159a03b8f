#include "transport/host.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "transport/agreement.h"

namespace fastsync {

namespace {

using Group = Host::Group;

constexpr int64_t kLongestText = 256;

// Not every rank could do its part, and all have heard why.
struct CannotShare {
  std::string why;
};

std::vector<std::string> gather(const Group& group, const std::string& text) {
  return gather_texts(group, text.substr(0, kLongestText - 1), kLongestText, c10::kCPU);
}

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

// Every rank does its part, and hears what each rank's returned. All throw CannotShare where one has thrown.
template <class Part>
std::vector<std::string> vote(const Group& group, const Part& part) {
  std::string text;
  const std::string failure = failure_of([&] {
    if constexpr (std::is_void_v<decltype(part())>) {
      part();
    } else {
      text = part();
    }
  });
  std::vector<std::string> found = gather(group, failure.empty() ? "+" + text : "-" + failure);
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].front() == '-') {
      throw CannotShare{c10::str("rank ", rank, ": ", found[rank].substr(1))};
    }
    found[rank].erase(0, 1);
  }
  return found;
}

// Empty where it is not set.
std::string setting() {
  const char* const value = std::getenv("FASTSYNC_SHARED_MEMORY");
  return value == nullptr ? "" : value;
}

bool is_on(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(), [](unsigned char letter) { return std::tolower(letter); });
  if (value.empty() || value == "1" || value == "yes" || value == "true" || value == "on") {
    return true;
  }
  TORCH_CHECK_VALUE(value == "0" || value == "no" || value == "false" || value == "off",
                    "fastsync: FASTSYNC_SHARED_MEMORY: expected 0 or 1, got '", setting(), "'");
  return false;
}

// Memory that shows that this process can share some.
Descriptor try_memory() {
  TORCH_CHECK(is_on(setting()), "FASTSYNC_SHARED_MEMORY=", setting());
  Descriptor memory = SharedMemory::make(1);
  const SharedMemory shared(memory, 1);
  shared.check_room();
  shared.claim(memory, 0, 1);
  return memory;
}

// One that ends with the process, or when that closes the memory. A child that is forked does not have it.
struct flock lock_of(int64_t rank) {
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

void hold_lock(const Descriptor& memory, int64_t rank) {
  struct flock lock = lock_of(rank);
  TORCH_CHECK(fcntl(memory.number(), F_SETLK, &lock) == 0, "fcntl(F_SETLK): ", std::strerror(errno));
}

int64_t first_byte_of(int64_t place, int64_t size, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return place == size ? bytes : bytes / size * place / page * page;
}

}  // namespace

std::chrono::milliseconds limit_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::kCPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return kBackendDefaultTimeout;
  }
}

void Host::check_setting() { is_on(setting()); }

std::string Host::obstacle() {
  return failure_of([] { try_memory(); });
}

std::shared_ptr<Host> Host::of(const Group& group) {
  static std::mutex mutex;
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> group;  // so that no other comes to its address
    std::weak_ptr<Host> host;
  };
  static auto& hosts = *new std::map<const c10d::ProcessGroup*, Entry>();
  std::shared_ptr<Host> known;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(hosts, [](const auto& entry) { return entry.second.host.expired(); });
    if (const auto found = hosts.find(group.get()); found != hosts.end()) {
      known = found->second.host.lock();
    }
  }
  // On some ranks the last one that used it may be gone.
  const auto ids = gather(group, known ? known->id_ : "");
  if (known && std::all_of(ids.begin(), ids.end(), [&](const auto& id) { return id == known->id_; })) {
    return known;
  }
  std::shared_ptr<Host> made(new Host(group));
  const std::lock_guard<std::mutex> lock(mutex);
  hosts.insert_or_assign(group.get(), Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), made});
  return made;
}

// See Note [Sharing memory with processes that nobody forked].
Host::Host(const Group& group) {
  const int64_t rank = group->getRank();
  try {
    Descriptor listener;
    const auto names = vote(group, [&] {
      locks_ = try_memory();
      const std::string name = random_name();
      listener = listen_at(name);
      return name;
    });
    id_ = names.front();
    const auto firsts = vote(group, [&] {
      for (int64_t peer = 0; peer < rank; ++peer) {
        if (Descriptor connection = connect_to(names[peer]); connection.is_open()) {
          connections_.push_back(std::move(connection));
          return std::to_string(peer);
        }
      }
      return std::to_string(rank);
    });
    find_hosts(firsts, rank);
    vote(group, [&] {
      if (is_first(group)) {
        connections_ = accept_all(listener);
        hand_out(locks_);
      }
    });
    vote(group, [&] {
      if (!is_first(group)) {
        locks_ = receive_descriptor(connections_.front());
      }
      hold_lock(locks_, rank);
    });
  } catch (const CannotShare& failure) {
    why_not_ = failure.why;
    hosts_.clear();
    connections_.clear();
  }
}

// By the first rank that each one reaches.
void Host::find_hosts(const std::vector<std::string>& firsts, int64_t rank) {
  std::map<size_t, Ranks> by_first;
  for (size_t other = 0; other < firsts.size(); ++other) {
    const size_t first = std::stoul(firsts[other]);
    by_first[first].push_back(static_cast<int64_t>(other));
    if (firsts[first] != firsts[other]) {
      throw CannotShare{c10::str("rank ", first, " reaches a process that rank ", other, " on its host does not")};
    }
  }
  if (by_first.size() == firsts.size()) {
    throw CannotShare{"no two ranks are on one host, in one network namespace"};
  }
  for (auto& [first, ranks] : by_first) {
    if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end()) {
      place_ = hosts_.size();
    }
    hosts_.push_back(std::move(ranks));
  }
}

void Host::hand_out(const Descriptor& memory) const {
  for (const Descriptor& connection : connections_) {
    send_descriptor(connection, memory);
  }
}

bool Host::has_left(int64_t rank) const {
  struct flock lock = lock_of(rank);
  return fcntl(locks_.number(), F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes, std::string& why_not) {
  try {
    Descriptor memory;
    vote(group, [&] {
      if (is_first(group)) {
        memory = SharedMemory::make(bytes);
        hand_out(memory);
      }
    });
    std::shared_ptr<SharedMemory> shared;
    vote(group, [&] {
      if (!is_first(group)) {
        memory = receive_descriptor(connections_.front());
      }
      shared = std::make_shared<SharedMemory>(memory, bytes);
      shared->check_room();
    });
    vote(group, [&] {
      const auto size = static_cast<int64_t>(ranks().size());
      const int64_t place = std::find(ranks().begin(), ranks().end(), group->getRank()) - ranks().begin();
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
  const auto host = Host::of(group);
  return host->why_not().empty() ? host->hosts() : std::vector<Host::Ranks>();
}

}  // namespace fastsync
