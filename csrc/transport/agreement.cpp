#include "transport/agreement.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <sstream>
#include <vector>

#include "passes/backend.h"
#include "transport/team.h"
#include "transport/without_python_objects.h"

namespace fastsync {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

std::vector<at::Tensor> all_gather(const Group& group, const at::Tensor& mine, c10::Device device) {
  const WithoutPythonObjects without_python;
  std::vector<at::Tensor> input{mine.to(device_of_sums(*group, device))};
  std::vector<std::vector<at::Tensor>> output(1);
  for (int64_t rank = 0; rank < group->getSize(); ++rank) {
    output[0].push_back(at::empty_like(input[0]));
  }
  group->allgather(output, input)->wait();
  std::vector<at::Tensor> on_cpu;
  for (const at::Tensor& tensor : output[0]) {
    on_cpu.push_back(tensor.cpu());
  }
  return on_cpu;
}

// "rank 0, 2: compression fp16; rank 1: compression none", for the first line in which the ranks differ.
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

// Threads with groups of their own agree side by side.
void raise_to(std::atomic<int64_t>& number, int64_t least) {
  int64_t now = number;
  while (now < least && !number.compare_exchange_weak(now, least)) {
  }
}

}  // namespace

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
  for (const at::Tensor& row : all_gather(group, padded, device)) {
    texts.emplace_back(reinterpret_cast<const char*>(row.data_ptr<uint8_t>()));
  }
  return texts;
}

Agreed check_agreement(const Group& group, const std::string& description, c10::Device device, uint64_t data) {
  static std::atomic<int64_t> next_number{0};
  if (group->getSize() == 1) {
    return {next_number++};
  }
  TORCH_CHECK(!is_capturing(device),
              "fastsync: the ranks have to agree on what to synchronise, which cannot be part of ",
              "a CUDA graph: take a step like this one, on all ranks, before capturing it");
  at::Tensor mine = at::empty({4}, at::kLong);
  auto* values = mine.data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(fingerprint(description));
  values[1] = static_cast<int64_t>(description.size());
  values[2] = next_number;
  values[3] = static_cast<int64_t>(data);
  bool agree = true;
  bool have_same_data = data != 0;
  int64_t longest = 0;
  int64_t number = 0;
  for (const at::Tensor& theirs : all_gather(group, mine, device)) {
    const auto* their_values = theirs.const_data_ptr<int64_t>();
    agree = agree && values[0] == their_values[0] && values[1] == their_values[1];
    longest = std::max(longest, their_values[1]);
    number = std::max(number, their_values[2]);
    have_same_data = have_same_data && values[3] == their_values[3];
  }
  if (agree) {
    raise_to(next_number, number + 1);
    return {number, have_same_data};
  }
  const auto texts = gather_texts(group, description, longest + 1, device);
  TORCH_CHECK_VALUE(false, "fastsync: the ranks do not agree on what to synchronise: ", first_difference(texts),
                    ". Nothing of this bucket was sent; give every rank the same model and the same settings.");
}

}  // namespace fastsync
