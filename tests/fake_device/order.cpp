#include "order.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace fake_device {
namespace {

struct Access {
  const char* begin;
  const char* end;
  bool is_written;
  size_t stream;
  uint64_t time;
  std::string name;
};

struct Block {
  size_t bytes;
  size_t stream;               // in whose pool it belongs
  std::set<size_t> recorded;   // record_stream's: it returns there once these have done what they have been given
  std::vector<Access> newest;  // what no later access makes superfluous
  int64_t number;              // how many blocks were allocated before
};

// An access of a graph that was captured, to memory from before the capture.
struct Captured {
  const char* data;
  int64_t block;  // its number
  std::string name;
};

struct World {
  std::mutex mutex;
  std::vector<Clock> streams;
  Clock host;  // what the host has seen the end of: all that it launches comes after
  std::map<const char*, Block> blocks;
  std::deque<std::pair<char*, size_t>> freed;  // kept from reuse for a while, so that whoever still uses them is found
  size_t freed_bytes = 0;
  int64_t num_allocated = 0;
  bool is_capturing = false;
  int64_t first_of_graph = 0;  // the number of the first block that is allocated in the capture under way
  std::vector<std::vector<Captured>> graphs;
  std::vector<std::string> violations;
  std::vector<std::string> host_waits;
};

World& world() {
  static auto& world = *new World();  // outlives all tensors
  return world;
}

constexpr size_t kQuarantineBytes = 64 << 20;
constexpr size_t kMaxViolations = 50;

size_t index_of(const c10::Stream& stream) {
  return static_cast<size_t>(stream.id()) * kNumDevices + static_cast<size_t>(stream.device_index());
}

std::string name_of(size_t stream) {
  return c10::str("stream ", stream / kNumDevices, " of device ", stream % kNumDevices);
}

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

bool has_seen(const Clock& clock, size_t stream, uint64_t time) {
  return time == 0 || (stream < clock.size() && clock[stream] >= time);
}

// With what the host has waited for before it launches more.
Clock& clock_of(World& now, size_t stream) {
  if (now.streams.size() <= stream) {
    now.streams.resize(stream + 1);
  }
  Clock& clock = now.streams[stream];
  clock.resize(std::max(clock.size(), stream + 1));
  join(clock, now.host);
  return clock;
}

void report_to(World& now, std::string violation) {
  if (now.violations.size() < kMaxViolations) {
    now.violations.push_back(std::move(violation));
  }
}

Block* block_of(World& now, const void* data) {
  const auto* place = static_cast<const char*>(data);
  auto found = now.blocks.upper_bound(place);
  if (found == now.blocks.begin()) {
    return nullptr;
  }
  --found;
  return place < found->first + found->second.bytes ? &found->second : nullptr;
}

std::string describe(const Access& access) {
  return c10::str(access.name, access.is_written ? " (writes, " : " (reads, ", name_of(access.stream), ")");
}

void touch(World& now, Block& block, const Access& access, const Clock& clock) {
  const auto overlaps = [&](const Access& other) { return other.begin < access.end && access.begin < other.end; };
  for (const Access& other : block.newest) {
    if (overlaps(other) && (other.is_written || access.is_written) && !has_seen(clock, other.stream, other.time)) {
      report_to(now, c10::str("race: nothing orders ", describe(access), " after ", describe(other)));
    }
  }
  std::erase_if(block.newest, [&](const Access& other) {
    const bool covers = access.begin <= other.begin && other.end <= access.end;
    return covers && has_seen(clock, other.stream, other.time) && (access.is_written || !other.is_written) &&
           (access.is_written || other.stream == access.stream);
  });
  block.newest.push_back(access);
}

}  // namespace

void run(const c10::Stream& stream, const std::string& name, const std::vector<Touch>& touches) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  const size_t index = index_of(stream);
  Clock& clock = clock_of(now, index);
  clock[index] += 1;
  for (const Touch& each : touches) {
    if (each.bytes == 0) {
      continue;
    }
    const auto* begin = static_cast<const char*>(each.data);
    if (Block* block = block_of(now, begin)) {
      touch(now, *block, {begin, begin + each.bytes, each.is_written, index, clock[index], name}, clock);
      if (now.is_capturing && block->number < now.first_of_graph) {
        now.graphs.back().push_back({begin, block->number, name});
      }
    } else {
      report_to(now, c10::str("stray: ", name, " on ", name_of(index), each.is_written ? " writes" : " reads",
                              " memory that is not the device's, or not any more"));
    }
  }
}

void record(Event& event, const c10::Stream& stream) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  event.clock = clock_of(now, index_of(stream));
  event.time = std::chrono::steady_clock::now();
}

void block(const Event& event, const c10::Stream& stream) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  join(clock_of(now, index_of(stream)), event.clock);
}

// ---- the host -------------------------------------------------------------------------------------------------------

void wait_on_host(const Clock& clock, const std::string& why) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  join(now.host, clock);
  now.host_waits.push_back(why);
  if (now.is_capturing) {
    report_to(now, c10::str("capture: the host waits for ", why, ", which ends a capture with an error"));
  }
}

void wait_on_host(const c10::Stream& stream, const std::string& why) {
  Event event;
  record(event, stream);
  wait_on_host(event.clock, why);
}

bool query(const Event& event) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  join(now.host, event.clock);
  if (now.is_capturing) {
    report_to(now, "capture: an event is queried, which ends a capture with an error");
  }
  return true;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

void* allocate(size_t bytes, const c10::Stream& stream) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  auto* data = static_cast<char*>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  std::memset(data, 0xFF, bytes);
  const size_t index = index_of(stream);
  // Whoever had it before was on this stream: others have to wait for what this stream has been given so far.
  const Access allocation{data, data + bytes, true, index, clock_of(now, index)[index], "allocation"};
  now.blocks[data] = {bytes, index, {}, {allocation}, now.num_allocated++};
  return data;
}

void free(void* data) noexcept {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  const auto found = now.blocks.find(static_cast<char*>(data));
  const Block& block = found->second;
  Clock clock = clock_of(now, block.stream);
  for (const size_t stream : block.recorded) {
    join(clock, clock_of(now, stream));
  }
  for (const Access& access : block.newest) {
    if (!has_seen(clock, access.stream, access.time)) {
      report_to(now, c10::str("let go too early: ", block.bytes, " bytes return to the pool of ", name_of(block.stream),
                              ", which does not wait for ", describe(access)));
    }
  }
  std::memset(data, 0xFF, block.bytes);
  now.freed.emplace_back(static_cast<char*>(data), block.bytes);
  now.freed_bytes += block.bytes;
  now.blocks.erase(found);
  while (now.freed_bytes > kQuarantineBytes) {
    std::free(now.freed.front().first);
    now.freed_bytes -= now.freed.front().second;
    now.freed.pop_front();
  }
}

void record_stream(const void* data, const c10::Stream& stream) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  if (Block* block = block_of(now, data)) {
    block->recorded.insert(index_of(stream));
  }
}

size_t allocated_bytes() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  size_t bytes = 0;
  for (const auto& [begin, block] : now.blocks) {
    bytes += block.bytes;
  }
  return bytes;
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

void begin_capture() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  now.is_capturing = true;
  now.first_of_graph = now.num_allocated;
  now.graphs.emplace_back();
}

int64_t end_capture() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  now.is_capturing = false;
  return static_cast<int64_t>(now.graphs.size()) - 1;
}

bool is_capturing() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  return now.is_capturing;
}

void replay(int64_t graph) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  for (const Captured& access : now.graphs.at(graph)) {
    const Block* const block = block_of(now, access.data);
    if (block == nullptr || block->number != access.block) {
      report_to(now, c10::str("replay: ", access.name, " touches memory that was let go since the capture"));
    }
  }
}

// ---- what was found -------------------------------------------------------------------------------------------------

void report(std::string violation) {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  report_to(now, std::move(violation));
}

std::vector<std::string> take_violations() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  return std::exchange(now.violations, {});
}

std::vector<std::string> take_host_waits() {
  World& now = world();
  const std::lock_guard<std::mutex> lock(now.mutex);
  return std::exchange(now.host_waits, {});
}

}  // namespace fake_device
