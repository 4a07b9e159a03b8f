#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>

#include "transport/agreement.h"

namespace fastsync {

namespace {

using Group = Host::Group;

constexpr std::chrono::seconds kPatience(20);  // with a rank that has said that it is about to answer
constexpr int64_t kLongestText = Connection::kLongest;

Deadline patience() { return std::chrono::steady_clock::now() + kPatience; }

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

// Every rank tries, and every rank comes to hear how it went. The first that failed, and why, is what all return.
std::string vote(const Group& group, const std::function<void()>& attempt) {
  const auto failures = gather(group, failure_of(attempt));
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) {
      return c10::str("rank ", rank, ": ", failures[rank]);
    }
  }
  return "";
}

// Where other ranks come in.
struct Invitation {
  Invitation() {
    const char* const setting = std::getenv("FASTSYNC_SHARED_MEMORY");
    TORCH_CHECK(setting == nullptr || std::string(setting) != "0", "FASTSYNC_SHARED_MEMORY=0");
    const Descriptor memory = SharedMemory::make(1);
    SharedMemory(memory, 1).claim(memory, 0, 1);
  }

  Listener listener;
  std::string secret = random_text();
};

bool is_open(const Connection& connection) { return connection.is_open(); }

int64_t first_byte_of(int64_t rank, int64_t size, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return rank == size ? bytes : bytes / size * rank / page * page;
}

}  // namespace

std::string Host::obstacle() {
  return failure_of([] { const Invitation invitation; });
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

// Whoever can be connected to is on this host, and is the rank that it says, for nobody else knows the secret. A
// listener takes connections before it accepts them, so none waits for another.
Host::Host(const Group& group) : connections_(static_cast<size_t>(group->getSize())) {
  const auto rank = static_cast<size_t>(group->getRank());
  std::optional<Invitation> invitation;
  const std::string failure = failure_of([&] { invitation.emplace(); });
  const auto invitations = gather(group, failure.empty() ? invitation->listener.address() + invitation->secret : "");
  id_ = std::to_string(fingerprint(std::accumulate(invitations.begin(), invitations.end(), std::string())));
  why_not_ = vote(group, [&] {
    TORCH_CHECK(failure.empty(), failure);
    for (size_t peer = 0; peer < rank && !invitations[peer].empty(); ++peer) {  // an empty one's rank says why
      connections_[peer] = Connection::to(invitations[peer].substr(0, kRandomLength));
      connections_[peer].send(invitations[peer].substr(kRandomLength) + std::to_string(rank));
    }
  });
  if (why_not_.empty()) {
    why_not_ = vote(group, [&] {
      const Deadline deadline = patience();
      while (!std::all_of(connections_.begin() + rank + 1, connections_.end(), is_open)) {
        Connection connection = invitation->listener.accept(deadline);
        const std::string text = connection.is_same_user() ? connection.receive(deadline).text : "";
        for (size_t peer = rank + 1; peer < connections_.size(); ++peer) {
          if (text == invitation->secret + std::to_string(peer)) {
            connections_[peer] = std::move(connection);
            break;
          }
        }
      }
    });
  }
  if (!why_not_.empty()) {
    connections_.clear();
  }
}

std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes, std::string& why_not) {
  std::shared_ptr<SharedMemory> shared;
  why_not = vote(group, [&] {
    const std::string number = std::to_string(++num_shared_);
    const std::string none = number + ": none";
    Descriptor memory;
    if (group->getRank() == 0) {
      const std::string failure = failure_of([&] { memory = SharedMemory::make(bytes); });
      for (const Connection& connection : connections_) {
        if (connection.is_open()) {
          connection.send(failure.empty() ? number : none, memory);
        }
      }
      TORCH_CHECK(failure.empty(), failure);
    } else {
      const Deadline deadline = patience();
      auto message = connections_.front().receive(deadline);
      while (message.text != number && message.text != none) {  // of a try that failed here
        message = connections_.front().receive(deadline);
      }
      if (message.text == none) {
        return;  // rank 0 says why
      }
      memory = std::move(message.descriptor);
    }
    shared = std::make_shared<SharedMemory>(memory, bytes);
    const int64_t size = group->getSize();
    const int64_t rank = group->getRank();
    shared->claim(memory, first_byte_of(rank, size, bytes), first_byte_of(rank + 1, size, bytes));
  });
  return why_not.empty() ? shared : nullptr;
}

}  // namespace fastsync
