#include "transport/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <map>
#include <sstream>
#include <thread>
#include <vector>

#include "passes/cuda_graphs.h"
#include "transport/backend_name.h"
#include "transport/without_python_objects.h"

namespace fastsync {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// The version of fastsync's protocol: how buckets are laid out, the order of messages, wires, side values. Raise it
// with each change of these, because ranks with different versions would add up what does not belong together.
constexpr int kProtocol = 5;
const char* const kProtocolLine = "fastsync's protocol ";

// Calls look until the work is done, and sleeps in between. Each sleep is a part of the time that the wait has lasted,
// so that no wait gets much longer.
void look_while_waiting(c10d::ProcessGroup& group, c10d::Work& work, const std::function<void()>& look) {
  using Clock = std::chrono::steady_clock;
  constexpr Clock::duration kShortest = std::chrono::microseconds(20);
  constexpr Clock::duration kLongest = std::chrono::milliseconds(10);
  const auto began = Clock::now();
  while (!work.isCompleted()) {
    try {
      look();
    } catch (...) {
      // The other ranks would take this collective, which they never join, for their next one.
      close_connections(group);
      throw;
    }
    std::this_thread::sleep_for(std::clamp((Clock::now() - began) / 8, kShortest, kLongest));
  }
}

// Returns a row for each rank, on the CPU. It calls look only with Gloo, because other backends' works may not tell
// that they are done before somebody waits for them.
at::Tensor all_gather(const Group& group, const at::Tensor& mine, c10::Device device,
                      const std::function<void()>& look = nullptr) {
  const WithoutPythonObjects without_python;
  std::vector<at::Tensor> input{mine.to(device)};
  const at::Tensor all = at::empty({group->getSize(), mine.numel()}, input.front().options());
  std::vector<std::vector<at::Tensor>> output{all.unbind()};
  const auto work = group->allgather(output, input);
  if (look && device.is_cpu() && sends_by_gloo(*group, device)) {
    look_while_waiting(*group, *work, look);
  }
  work->wait();
  return all.cpu();
}

// Describes the first line in which the ranks differ, as in "rank 0, 2: compression fp16; rank 1: compression none".
std::string first_difference(const std::vector<std::string>& texts) {
  std::vector<std::istringstream> rest(texts.begin(), texts.end());
  std::map<std::string, std::string> ranks_of;
  while (ranks_of.size() < 2 && ranks_of.count("nothing") == 0) {
    ranks_of.clear();
    for (size_t rank = 0; rank < rest.size(); ++rank) {
      std::string line;
      std::string& ranks = ranks_of[std::getline(rest[rank], line) ? line : "nothing"];
      ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
    }
  }
  std::string difference;
  for (const auto& [line, ranks] : ranks_of) {
    difference += (difference.empty() ? "" : "; ") + ranks + ": " + line;
  }
  return difference;
}

}  // namespace

void close_connections(c10d::ProcessGroup& group) { close_connections(*group.getBackend(c10::kCPU)); }

void close_connections(c10d::Backend& backend) {
  constexpr int kNeverSent = (1 << 30) - 1;  // a tag that precedes those of all engines
  std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
  for (int away = 1; away < backend.getSize(); ++away) {  // a connection that is broken already would close no others
    const int peer = (backend.getRank() + away) % backend.getSize();
    try {
      backend.recv(nothing, peer, kNeverSent)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
    }
  }
  backend.abort();  // of a backend that has other ways than connections
}

// FNV-1a, 64 bits (Fowler, Noll, Vo); std::hash may differ from machine to machine.
uint64_t fingerprint(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const unsigned char byte : text) {
    hash = (hash ^ byte) * 0x100000001B3ULL;
  }
  return hash;
}

std::vector<std::string> gather_texts(const Group& group, const std::string& text, int64_t size, c10::Device device) {
  at::Tensor padded = at::zeros({size}, at::kByte);
  std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
  std::vector<std::string> texts;
  for (const at::Tensor& row : all_gather(group, padded, device).unbind()) {
    const auto* const theirs = reinterpret_cast<const char*>(row.const_data_ptr<uint8_t>());
    texts.emplace_back(theirs, strnlen(theirs, size));  // a peer may have ended its text or not
  }
  return texts;
}

// The next number is atomic, because threads that have groups of their own may agree at the same time.
Agreed check_agreement(const Group& group, const std::string& lines, c10::Device device, const std::string& what,
                       const std::function<void()>& look, bool has_failed) {
  static std::atomic<int64_t> next_number{0};
  constexpr int64_t kFailed = int64_t{1} << 62;  // added to the size of a rank that has failed
  if (group->getSize() == 1) {
    return {next_number++, has_failed};
  }
  TORCH_CHECK(!is_capturing(device),
              "fastsync: the ranks have to agree on what to synchronise, which cannot be part of ",
              "a CUDA graph: take a step like this one, on all ranks, before capturing it");
  const std::string description = c10::str(kProtocolLine, kProtocol, "\n", lines);
  const at::Tensor mine = at::tensor(
      {static_cast<int64_t>(fingerprint(description)), static_cast<int64_t>(description.size()), next_number.load()},
      at::kLong);
  const at::Tensor sent = mine.clone();
  sent[1] += has_failed ? kFailed : 0;
  const at::Tensor all = all_gather(group, sent, device, look);
  const bool has_one_failed = all.select(1, 1).ge(kFailed).any().item<bool>();
  all.select(1, 1).remainder_(kFailed);
  const at::Tensor is_same = (all == mine).all(/*dim=*/0);
  const at::Tensor largest = all.amax(/*dim=*/0);
  if (is_same[0].item<bool>() && is_same[1].item<bool>()) {
    const auto number = largest[2].item<int64_t>();
    for (int64_t now = next_number; now <= number && !next_number.compare_exchange_weak(now, number + 1);) {
    }
    return {number, has_one_failed};
  }
  constexpr int64_t kLongest = 1 << 28;
  const auto longest = largest[1].item<int64_t>();
  TORCH_CHECK(longest < kLongest, "a rank told of a description of ", longest, " bytes");
  const auto texts = gather_texts(group, description, longest + 1, device);
  const std::string difference = first_difference(texts);
  const bool are_versions = difference.find(kProtocolLine) != std::string::npos;
  C10_THROW_ERROR(ValueError, c10::str("fastsync: the ranks do not agree on ", what, ": ", difference, "; ",
                                       are_versions ? "install the same version of fastsync on every host"
                                                    : "give every rank the same model and the same settings"));
}

}  // namespace fastsync
