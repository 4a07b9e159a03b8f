#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>

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
std::vector<std::string> vote(const Group& group, const std::function<std::string()>& part) {
  std::string text;
  const std::string failure = failure_of([&] { text = "+" + part(); });
  text = failure.empty() ? text : "-" + failure;
  std::vector<std::string> told = gather_texts(group, text.substr(0, kLongestText - 1), kLongestText, c10::kCPU);
  for (size_t rank = 0; rank < told.size(); ++rank) {
    if (told[rank].front() == '-') {
      throw CannotShare{c10::str("rank ", rank, ": ", told[rank].substr(1))};
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

// The same for processes that find each other's memory in /proc. Those of several network namespaces could, too, but
// are meant to be apart.
std::string name_of_host() {
  TORCH_CHECK(is_on(), "FASTSYNC_SHARED_MEMORY=0");
  std::string name;
  TORCH_CHECK(std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), name), "the machine has no boot_id");
  for (const char* const space : {"/proc/self/ns/pid", "/proc/thread-self/ns/net"}) {
    name += " " + std::filesystem::read_symlink(space).string();
  }
  return c10::str(name, " user ", geteuid());
}

// A process's number in /proc, and when it began, for numbers are given again. Only the number where it has ended, also
// where nobody has waited for it yet. See proc(5): the name, which may hold anything, is followed by the state, by 18
// fields, and by the beginning.
std::string process_of(const std::string& number) {
  std::ifstream file("/proc/" + number + "/stat");
  const std::string status(std::istreambuf_iterator<char>(file), {});
  std::istringstream fields(status.substr(status.rfind(')') + 1));
  const std::vector<std::string> after_name(std::istream_iterator<std::string>(fields), {});
  const bool is_there = after_name.size() > 19 && after_name[0] != "Z" && after_name[0] != "X";
  return number + (is_there ? " " + after_name[19] : "");
}

int64_t first_byte_of(int64_t place, int64_t size, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  return place == size ? bytes : bytes / size * place / page * page;
}

}  // namespace

void Host::check_setting() { is_on(); }

std::string Host::obstacle() {
  return failure_of([] {
    name_of_host();
    const SharedMemory made(1);
    made.claim(0, 1);
    const SharedMemory opened(made.address(), 1);
  });
}

// See Note [Sharing memory with processes that nobody forked].
Host::Host(const Group& group) {
  try {
    auto names = vote(
        group, [] { return c10::str(name_of_host(), "\n", process_of(std::filesystem::read_symlink("/proc/self"))); });
    for (std::string& name : names) {
      const size_t end = name.find('\n');
      processes_.push_back(name.substr(end + 1));
      name.resize(end);
    }
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
  } catch (const CannotShare& failure) {
    why_not_ = failure.why;
    hosts_.clear();
  }
}

std::shared_ptr<SharedMemory> Host::share(const Group& group, int64_t bytes) {
  if (!why_not_.empty()) {
    return nullptr;
  }
  const int64_t rank = group->getRank();
  std::shared_ptr<SharedMemory> shared;
  try {
    const auto addresses = vote(group, [&] {
      shared = rank == ranks().front() ? std::make_shared<SharedMemory>(bytes) : nullptr;
      return shared ? shared->address() : "";
    });
    vote(group, [&] {
      shared = shared ? shared : std::make_shared<SharedMemory>(addresses[ranks().front()], bytes);
      const auto size = static_cast<int64_t>(ranks().size());
      const int64_t place = std::find(ranks().begin(), ranks().end(), rank) - ranks().begin();
      shared->claim(first_byte_of(place, size, bytes), first_byte_of(place + 1, size, bytes));
      return "";
    });
    shared->close_file();
  } catch (const CannotShare& failure) {
    why_not_ = failure.why;
    shared.reset();
  }
  return shared;
}

bool Host::has_ended(int64_t rank) const {
  const std::string& process = processes_[rank];
  return process_of(process.substr(0, process.find(' '))) != process;
}

std::vector<Host::Ranks> hosts_of(const Group& group) {
  if (group->getSize() == 1 || group->getBackend(c10::kCPU)->getBackendName() != "gloo") {
    return {};
  }
  Host host(group);
  return host.share(group, 1) ? host.hosts() : std::vector<Host::Ranks>();
}

}  // namespace fastsync
