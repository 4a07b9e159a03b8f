// Who comes after whom on the fake device. Its work runs at once, on the host, which is one legal order of many; so
// each stream has a vector clock, each block of memory a list of who has touched it, and two accesses of which neither
// comes after the other are a race, although this once all went well.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fake_device {

constexpr int kNumDevices = 2;

// By stream: how many of its operations come before.
using Clock = std::vector<uint64_t>;

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
  bool is_timed = false;
};

// So many bytes that an operation reads, or writes and perhaps reads.
struct Touch {
  const void* data;
  int64_t bytes;
  bool is_written;
};

// An operation on a stream. The name is for reports.
void run(const c10::Stream& stream, const std::string& name, const std::vector<Touch>& touches);

void record(Event& event, const c10::Stream& stream);
void block(const Event& event, const c10::Stream& stream);

// The host waits until the device has come so far; it says what for.
void wait_on_host(const Clock& clock, const std::string& why);
void wait_on_host(const c10::Stream& stream, const std::string& why);
// Whether the host may see that an event has happened: it has, for work runs at once.
bool query(const Event& event);

// Memory of the caching allocator: from the stream's pool, to which it returns. Filled with 0xFF before and after.
void* allocate(size_t bytes, const c10::Stream& stream);
void free(void* data) noexcept;
// Another stream uses the block: it returns to its pool once that is done.
void record_stream(const void* data, const c10::Stream& stream);
size_t allocated_bytes();

// From begin_capture to end_capture all streams are captured. Work still runs at once, and is noted as well. The result
// is the graph's number.
void begin_capture();
int64_t end_capture();
bool is_capturing();
// Whoever replays a graph touches the same memory again. It reports memory that was let go since, unless that was
// allocated while the graph was captured: such memory is the graph's own.
void replay(int64_t graph);

void report(std::string violation);
// What was found since the last call: races, memory let go too early, misuse.
std::vector<std::string> take_violations();
// What the host waited for since the last call.
std::vector<std::string> take_host_waits();

}  // namespace fake_device
