#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include "transport/agreement.h"

namespace fastsync {

namespace {

using Group = Host::Group;

constexpr int64_t kLongestText = Connection::kLongest;

// With a rank that has said that it is about to answer.
Deadline patience(const Group& group) {
  return std::chrono::steady_clock::now() +
         std::min<std::chrono::milliseconds>(std::chrono::seconds(20), limit_of(*group));
}

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

// Every rank tries, and every rank comes to hear how it went. The first that failed, and why, is what all return; else
// `found` is what each rank's attempt has returned.
std::string vote(const Group& group, const std::function<std::string()>& attempt, std::vector<std::string>& found) {
  std::string text;
  const std::string failure = failure_of([&] { text = attempt(); });
  found = gather(group, failure.empty() ? "+" + text : "-" + failure);
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (found[rank].front() == '-') {
      return c10::str("rank ", rank, ": ", found[rank].substr(1));
    }
    found[rank].erase(0, 1);
  }
  return "";
}

std::string vote(const Group& group, const std::function<void()>& attempt) {
  std::vector<std::string> nothing;
  return vote(
      group,
      [&] {
        attempt();
        return std::string();
      },
      nothing);
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

// Where other ranks come in.
struct Invitation {
  Invitation() {
    TORCH_CHECK(is_on(setting()), "FASTSYNC_SHARED_MEMORY=", setting());
    const Descriptor memory = SharedMemory::make(1);
    const SharedMemory shared(memory, 1);
    shared.check_room();
    shared.claim(memory, 0, 1);
  }

  Listener listener;
  std::string secret = random_text();
};

// All ranks have sent theirs before any of them gets here. So who has said nothing is none of them.
std::string said_first(const Connection& connection) {
  std::string text;
  failure_of([&] { text = connection.is_same_user() ? connection.receive(Deadline()).text : ""; });
  return text;
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
  std::vector<std::string> reached;
  const auto reach = [&] {
    TORCH_CHECK(failure.empty(), failure);
    std::vector<size_t> peers{rank};
    for (size_t peer = rank; peer-- > 0 && !invitations[peer].empty();) {  // an empty one's rank says why
      connections_[peer] = Connection::to(invitations[peer].substr(0, kRandomLength));
      if (connections_[peer].is_open()) {
        connections_[peer].send(invitations[peer].substr(kRandomLength) + std::to_string(rank));
        peers.push_back(peer);
      }
    }
    return c10::str(peers.back(), " ", peers.size());
  };
  why_not_ = vote(group, reach, reached);
  if (why_not_.empty()) {
    find_hosts(reached, rank);
  }
  if (why_not_.empty()) {
    why_not_ = vote(group, [&] {
      const Deadline deadline = patience(group);
      const auto is_here = [&](int64_t peer) { return peer <= group->getRank() || connections_[peer].is_open(); };
      while (!std::all_of(ranks().begin(), ranks().end(), is_here)) {
        Connection connection = invitation->listener.accept(deadline);
        const std::string text = said_first(connection);
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

// Each rank says which is the first that it reaches, itself if there is none before it, and how many it reaches up to
// itself. Those of one host reach all of it.
void Host::find_hosts(const std::vector<std::string>& reached, size_t rank) {
  std::map<size_t, Ranks> by_first;
  for (size_t other = 0; other < reached.size(); ++other) {
    const size_t first = std::stoul(reached[other]);
    Ranks& ranks = by_first[first];
    ranks.push_back(static_cast<int64_t>(other));
    if (reached[other] != c10::str(first, " ", ranks.size())) {
      why_not_ = c10::str("rank ", other, " reaches some processes that others on its host do not, or not all");
      return;
    }
  }
  if (by_first.size() == reached.size()) {
    why_not_ = "no two ranks are on one host, in one network namespace";
    return;
  }
  for (auto& [first, ranks] : by_first) {
    if (std::find(ranks.begin(), ranks.end(), static_cast<int64_t>(rank)) != ranks.end()) {
      place_ = hosts_.size();
    }
    hosts_.push_back(std::move(ranks));
  }
}

std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes, std::string& why_not) {
  TORCH_CHECK(!std::exchange(is_sharing_, true), "the process group has failed before, in sharing memory");
  std::shared_ptr<SharedMemory> shared;
  Descriptor memory;
  why_not = vote(group, [&] {
    const std::string number = std::to_string(++num_shared_);
    const std::string none = number + ": none";
    if (group->getRank() == ranks().front()) {
      const std::string failure = failure_of([&] { memory = SharedMemory::make(bytes); });
      for (const Connection& connection : connections_) {
        if (connection.is_open()) {
          connection.send(failure.empty() ? number : none, memory);
        }
      }
      TORCH_CHECK(failure.empty(), failure);
    } else {
      const Deadline deadline = patience(group);
      const Connection& first = connections_[ranks().front()];
      auto message = first.receive(deadline);
      while (message.text != number && message.text != none) {  // of a try that failed here
        message = first.receive(deadline);
      }
      if (message.text == none) {
        return;  // the first rank says why
      }
      memory = std::move(message.descriptor);
    }
    shared = std::make_shared<SharedMemory>(memory, bytes);
    shared->check_room();
  });
  if (why_not.empty()) {
    why_not = vote(group, [&] {
      const auto size = static_cast<int64_t>(ranks().size());
      const int64_t place = std::find(ranks().begin(), ranks().end(), group->getRank()) - ranks().begin();
      shared->claim(memory, first_byte_of(place, size, bytes), first_byte_of(place + 1, size, bytes));
    });
  }
  is_sharing_ = false;
  return why_not.empty() ? shared : nullptr;
}

std::vector<Host::Ranks> hosts_of(const Group& group) {
  if (group->getSize() == 1 || group->getBackend(c10::kCPU)->getBackendName() != "gloo") {
    return {};
  }
  const auto host = Host::of(group);
  return host->why_not().empty() ? host->hosts() : std::vector<Host::Ranks>();
}

}  // namespace fastsync
