#include "transport/roll_call_store.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <numeric>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

namespace fastsync {
namespace {

using Clock = std::chrono::steady_clock;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

const char* const kNoAnswer = "no answer, so it is stopped or gone, or has no engine of this group";

StorePtr innermost(const StorePtr& store) {
  auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed == nullptr ? store : prefixed->getUnderlyingNonPrefixStore();
}

template <class Kind>
const Kind* as(const StorePtr& store) {
  return dynamic_cast<const Kind*>(innermost(store).get());
}

std::vector<uint64_t> global_ranks(const c10d::ProcessGroup& group) {
  try {
    return group.getDefaultBackend()->getBackendOptions()->global_ranks_in_group;
  } catch (const std::exception&) {
    return {};
  }
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string question_key(int64_t number) { return c10::str("question/", number); }
std::string last_key(int64_t rank) { return c10::str("last/", rank); }

}  // namespace

// Whether the server of a TCPStore is there still. Its client warns, with a stack trace, when it finds out by itself,
// as at the end of a job whose rank 0 holds the store and ends first.
class RollCallStore::Server {
 public:
  explicit Server(const c10d::TCPStore& store) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (getaddrinfo(store.getHost().c_str(), std::to_string(store.getPort()).c_str(), &hints, &found) != 0) {
      return;
    }
    for (const addrinfo* each = found; each != nullptr && !is_connected_; each = each->ai_next) {
      close(socket_);
      socket_ = socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, each->ai_protocol);
      is_connected_ = ::connect(socket_, each->ai_addr, each->ai_addrlen) == 0;
    }
    freeaddrinfo(found);
  }
  ~Server() { close(socket_); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  void check() const {
    char byte = 0;
    TORCH_CHECK(is_connected_ && recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN,
                "the store is gone");
  }

 private:
  int socket_ = -1;
  bool is_connected_ = false;
};

bool RollCallStore::is_usable(const StorePtr& store) {
  return store && (as<c10d::TCPStore>(store) != nullptr || as<c10d::FileStore>(store) != nullptr ||
                   as<c10d::HashStore>(store) != nullptr);
}

RollCallStore::RollCallStore(const c10d::ProcessGroup& group)
    : rank_(group.getRank()),
      size_(group.getSize()),
      global_ranks_(global_ranks(group)),
      has_server_(as<c10d::TCPStore>(group.getStore()) != nullptr),
      store_(group.getStore()) {}

RollCallStore::~RollCallStore() = default;

// Where it has a server, with a connection of its own: one that hangs would hold up everybody who shares it, and a
// store that is kept would keep the server alive.
void RollCallStore::connect() {
  if (is_connected_) {
    if (server_) {
      server_->check();
    }
    return;
  }
  if (const auto* tcp = as<c10d::TCPStore>(store_)) {
    server_ = std::make_unique<Server>(*tcp);
    server_->check();
  }
  const StorePtr own = store_->clone();
  if (innermost(own) != innermost(store_)) {
    constexpr std::chrono::seconds kLimit(3);
    own->setTimeout(kLimit);  // a FileStore whose file is gone waits for it
  }
  store_ = c10::make_intrusive<c10d::PrefixStore>("fastsync/roll_call", own);
  while (is_asked()) {
    num_questions_ += 1;  // before this rank was here
  }
  store_->deleteKey(last_key(rank_));  // of an engine before
  is_connected_ = true;
}

void RollCallStore::disconnect() {
  store_.reset();
  server_.reset();
}

bool RollCallStore::is_asked() { return store_->check({question_key(num_questions_)}); }

void RollCallStore::answer(const std::string& where) {
  num_questions_ += 1;
  asked_at_ = Clock::now();
  store_->set(answer_key(rank_), bytes_of(where));
}

void RollCallStore::leave(const std::string& where) { store_->set(last_key(rank_), bytes_of(where)); }

// All that ask at the same time ask the same question.
void RollCallStore::ask() {
  constexpr std::chrono::milliseconds kRecently(1500);
  if (num_questions_ == 0 || Clock::now() - asked_at_ > kRecently) {
    store_->set(question_key(num_questions_), bytes_of("where?"));
  }
}

std::string RollCallStore::answer_key(int64_t rank) const {
  return c10::str("answer/", num_questions_ - 1, "/", rank);  // to the newest question
}

bool RollCallStore::have_answered(int64_t first, int64_t last) {
  std::vector<std::string> keys;
  for (int64_t rank = first; rank < last; ++rank) {
    keys.push_back(answer_key(rank));
  }
  return store_->check(keys);
}

void RollCallStore::find_silent(int64_t first, int64_t last, std::vector<int64_t>& silent) {
  if (have_answered(first, last)) {
    return;
  }
  if (last - first == 1) {
    silent.push_back(first);
    return;
  }
  const int64_t middle = std::midpoint(first, last);
  find_silent(first, middle, silent);
  find_silent(middle, last, silent);
}

std::string RollCallStore::get(const std::string& key) {
  const std::vector<uint8_t> bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

// "rank 0, 2 (global 4, 6)"
std::string RollCallStore::names(const std::vector<int64_t>& ranks) const {
  std::string names = "rank ";
  std::string global;
  bool differ = false;
  for (const int64_t rank : ranks) {
    const auto of_rank = global_ranks_.empty() ? rank : static_cast<int64_t>(global_ranks_[rank]);
    differ |= of_rank != rank;
    names += (global.empty() ? "" : ", ") + std::to_string(rank);
    global += (global.empty() ? "" : ", ") + std::to_string(of_rank);
  }
  return differ ? names + " (global " + global + ")" : names;
}

// First who is missing, then who is elsewhere, last who is where this rank is.
std::string RollCallStore::answers() {
  std::vector<int64_t> silent;
  find_silent(0, size_, silent);
  std::map<std::pair<int, std::string>, std::vector<int64_t>> ranks_at;
  const std::string mine = get(answer_key(rank_));
  for (int64_t rank = 0; rank < size_; ++rank) {
    std::string where = kNoAnswer;
    if (!std::binary_search(silent.begin(), silent.end(), rank)) {
      where = get(answer_key(rank));
    } else if (store_->check({last_key(rank)})) {
      where = "no answer any more, and this one before: " + get(last_key(rank));
    }
    ranks_at[{where == kNoAnswer ? 0 : where == mine ? 2 : 1, where}].push_back(rank);
  }
  std::string text;
  for (const auto& [place, ranks] : ranks_at) {
    text += (text.empty() ? ". Where the ranks are: " : "; ") + names(ranks) + ": " + place.second;
  }
  return text;
}

std::string RollCallStore::why_none() const {
  const char* const of_agent = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool is_agents = of_agent != nullptr && std::string(of_agent) == "True";
  const char* const holder = is_agents ? ": the launcher, which holds it, is stopped or gone"
                                       : ": the process that holds it, as a rule rank 0's, is stopped or gone";
  return c10::str(". Where the other ranks are is not known, for the store of their group does not answer",
                  has_server_ ? holder : "");
}

}  // namespace fastsync
