#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <sstream>
#include <utility>

#include "transport/agreement.h"
#include "transport/backend_name.h"
#include "transport/per_group.h"

namespace fastsync {

namespace {

using Group = Host::Group;

constexpr int64_t kLongestText = 512;

Host::Exchange exchange_in(const Group& group) {
  return [group](const std::string& text) { return gather_texts(group, text, kLongestText, c10::kCPU); };
}

// Returns the message of the error that the call throws, or an empty one.
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

// Does this rank's part, and returns the text that each rank's part has returned. All ranks throw CannotShare if the
// part of one has thrown.
std::vector<std::string> vote(const Host::Exchange& exchange, const std::function<std::string()>& part) {
  std::string text;
  const std::string failure = failure_of([&] { text = "+" + part(); });
  text = failure.empty() ? text : "-" + failure;
  std::vector<std::string> told = exchange(text.substr(0, kLongestText - 1));
  for (size_t rank = 0; rank < told.size(); ++rank) {
    if (!told[rank].starts_with('+')) {
      throw CannotShare{c10::str("rank ", rank, ": ", told[rank].empty() ? "no answer" : told[rank].substr(1))};
    }
    told[rank].erase(0, 1);
  }
  return told;
}

bool is_on() {
  const char* const value = std::getenv("FASTSYNC_SHARED_MEMORY");
  const std::string setting = value == nullptr ? "" : value;
  TORCH_CHECK_VALUE(setting.empty() || setting == "0" || setting == "1",
                    "fastsync: FASTSYNC_SHARED_MEMORY: expected 0 or 1, got '", setting, "'");
  return setting != "0";
}

void check_is_on() { TORCH_CHECK(is_on(), "FASTSYNC_SHARED_MEMORY=0"); }

// Returns the same name in processes that find each other's memory in /proc. Network namespaces have different names:
// their processes would find it too, but are meant to be apart.
std::string name_of_host() {
  std::string name;
  TORCH_CHECK(std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), name), "the machine has no boot_id");
  for (const char* const space : {"/proc/self/ns/pid", "/proc/thread-self/ns/net"}) {
    name += " " + std::filesystem::read_symlink(space).string();
  }
  return c10::str(name, " user ", geteuid());
}

// Returns a process's number in /proc and when it began, because the system uses numbers again. Returns only the number
// if the process has ended, even if its parent has not waited for it yet. In the file, see proc(5), the name may hold
// anything. The state follows it, then 18 fields, then the beginning.
std::string process_of(const std::string& number) {
  std::ifstream file("/proc/" + number + "/stat");
  const std::string status(std::istreambuf_iterator<char>(file), {});
  std::istringstream fields(status.substr(status.rfind(')') + 1));
  const std::vector<std::string> after_name(std::istream_iterator<std::string>(fields), {});
  const bool is_there = after_name.size() > 19 && after_name[0] != "Z" && after_name[0] != "X";
  return number + (is_there ? " " + after_name[19] : "");
}

// Returns where a rank's part of the memory begins: at the beginning of a page. The part with the index `size` begins
// at the end of the memory.
int64_t begin_of_part(int64_t index, int64_t size, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return index == size ? bytes : bytes / size * index / page * page;
}

// The hosts that the ranks of this process's groups have found out.
struct KnownHosts {
  static KnownHosts& of_this_process();

  const pid_t process_id = getpid();
  std::mutex mutex;  // guards the next
  PerGroup<std::shared_ptr<const Host>> hosts;
};

// A forked child begins anew, as its peers do: it has other groups than its parent, and perhaps a locked mutex.
KnownHosts& KnownHosts::of_this_process() {
  static std::atomic<KnownHosts*> known{new KnownHosts};
  KnownHosts* current = known;
  if (current->process_id != getpid()) {
    auto* const own = new KnownHosts;
    current = known.compare_exchange_strong(current, own) ? own : known.load();
  }
  return *current;
}

}  // namespace

void Host::check_setting() { is_on(); }

std::string Host::obstacle() {
  return failure_of([] {
    check_is_on();
    name_of_host();
    const SharedMemory made(1);
    made.claim(0, 1);
    const SharedMemory opened(made.address(), 1);
  });
}

std::shared_ptr<const Host> Host::of(const Group& group) {
  const auto backend = group->getBackend(c10::kCPU);
  if (const auto* const knowing = dynamic_cast<const HasHost*>(backend.get()); knowing && knowing->host()) {
    return knowing->host();
  }
  KnownHosts& known = KnownHosts::of_this_process();
  {
    const std::lock_guard<std::mutex> lock(known.mutex);
    if (const auto& host = known.hosts[group]) {
      return host;
    }
  }
  auto host = std::make_shared<const Host>(group);  // without the lock, because it waits for the other ranks
  const std::lock_guard<std::mutex> lock(known.mutex);
  return known.hosts[group] = std::move(host);
}

// See Note [Sharing memory with processes that nobody forked].
Host::Host(const Group& group) : Host(group->getRank(), exchange_in(group)) {}

Host::Host(int64_t rank, const Exchange& exchange) : rank_(rank) {
  try {
    auto names = vote(exchange, [] {
      return c10::str(name_of_host(), "\n", process_of(std::filesystem::read_symlink("/proc/self")));
    });
    for (std::string& name : names) {
      const size_t end = name.find('\n');
      processes_.push_back(name.substr(end + 1));
      name.resize(end);
    }
    for (size_t other = 0; other < names.size(); ++other) {
      const auto is_of_it = [&](const Ranks& ranks) { return names[ranks.front()] == names[other]; };
      const auto host = std::find_if(hosts_.begin(), hosts_.end(), is_of_it);
      host == hosts_.end() ? hosts_.push_back({static_cast<int64_t>(other)})
                           : host->push_back(static_cast<int64_t>(other));
    }
    if (names.size() > 1 && hosts_.size() == names.size()) {
      throw CannotShare{"no two ranks are on one host, in one network namespace"};
    }
    ranks_ = *std::ranges::find_if(hosts_, [&](const Ranks& ranks) { return names[ranks.front()] == names[rank_]; });
  } catch (const CannotShare& failure) {
    why_not_ = failure.why;
    hosts_.clear();
  }
}

// The setting is read here and not once for a group, so that it may change before the next engine.
std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes) const {
  return share(exchange_in(group), bytes);
}

std::shared_ptr<SharedMemory> Host::share(const Exchange& exchange, int64_t bytes) const {
  if (!why_not_.empty()) {
    throw CannotShare{why_not_};
  }
  std::shared_ptr<SharedMemory> shared;
  const auto addresses = vote(exchange, [&] {
    check_is_on();
    shared = rank_ == ranks().front() ? std::make_shared<SharedMemory>(bytes) : nullptr;
    return shared ? shared->address() : "";
  });
  vote(exchange, [&] {
    shared = shared ? shared : std::make_shared<SharedMemory>(addresses[ranks().front()], bytes);
    const auto size = static_cast<int64_t>(ranks().size());
    const int64_t index = std::find(ranks().begin(), ranks().end(), rank_) - ranks().begin();
    shared->claim(begin_of_part(index, size, bytes), begin_of_part(index + 1, size, bytes));
    return "";
  });
  shared->close_file();
  return shared;
}

bool Host::has_ended(int64_t rank) const {
  const std::string& process = processes_[rank];
  return process_of(process.substr(0, process.find(' '))) != process;
}

std::vector<Host::Ranks> hosts_of(const Group& group) {
  if (group->getSize() == 1 || !sends_by_gloo(*group, c10::kCPU)) {
    return {};
  }
  const auto host = Host::of(group);
  try {
    host->share(group, 1);
    return host->hosts();
  } catch (const CannotShare&) {
    return {};
  }
}

}  // namespace fastsync
