// Many ranks, each a thread, call the roll over a store in memory that counts what it is asked.
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/roll_call.h"

namespace {

struct Store {
  int64_t add(const std::string& key, int64_t amount) {
    const auto lock = asked();
    const int64_t sum = (values[key].empty() ? 0 : std::stoll(values[key])) + amount;
    values[key] = std::to_string(sum);
    return sum;
  }
  std::string compareSet(const std::string& key, const std::string& expected, const std::string& desired) {
    const auto lock = asked();
    if (!values.contains(key)) {  // as TCPStore and FileStore have it
      return expected.empty() ? values[key] = desired : expected;
    }
    return values[key] == expected ? values[key] = desired : values[key];
  }
  bool check(const std::vector<std::string>& keys) {
    const auto lock = asked();
    return values.contains(keys.front());
  }
  void set(const std::string& key, const std::string& value) {
    const auto lock = asked();
    values[key] = value;
    longest = std::max<int64_t>(longest, std::ssize(value));
  }
  bool deleteKey(const std::string& key) {
    const auto lock = asked();
    return values.erase(key) > 0;
  }

  std::lock_guard<std::mutex> asked() {
    num_asked += 1;
    return std::lock_guard<std::mutex>(mutex);
  }

  std::mutex mutex;
  std::map<std::string, std::string> values;
  std::atomic<int64_t> num_asked = 0;
  int64_t longest = 0;
};

struct Connection {
  Store* store() const { return held; }
  Store* held;
};

}  // namespace

// Ranks that send no heartbeat are at least so many apart. `lost_reader` begins the roll call, and is lost. Writes how
// often all heartbeats were read, how often a rank asked the store on average, how long the summary is, and how many
// answers were right. Each rank calls the roll so many times, one after the other.
extern "C" __attribute__((visibility("default"))) void call_roll(int64_t num_ranks, int64_t apart, bool lost_reader,
                                                                 int64_t patience, int64_t num_calls, int64_t* out) {
  using fastsync::EngineStatus;
  Store store;
  if (lost_reader) {
    store.values["roll/reader/0"] = "-1";
  }
  std::atomic<int64_t> num_reads = 0;
  std::atomic<int64_t> num_right = 0;
  const auto read = [&] {
    const int64_t at = ++num_reads;
    std::vector<std::string> heartbeats;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const EngineStatus engine{"the engine of \"a weight\"", EngineStatus::Activity::kAveraging, 7, "", 7, {1, 2}};
      heartbeats.push_back(fastsync::to_text(fastsync::Heartbeat{rank % apart == 0 ? 1 : at, {engine}}));
    }
    return heartbeats;
  };
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      using std::chrono::milliseconds;
      const milliseconds listen_for(50);
      const milliseconds tolerance(num_calls == 1 ? 50 : 10);
      const fastsync::RollCall call{"roll", rank, listen_for, milliseconds(patience), tolerance};
      for (int64_t number = 0; number < num_calls; ++number) {
        const auto states = call.run(Connection{&store}, read);
        const bool is_right = std::ranges::all_of(states, [&](const auto& state) {
          return state.answers == (state.rank % apart != 0) && state.engines.front().step == 7 &&
                 state.engines.front().passed.size() == 2;
        });
        num_right += is_right && std::ssize(states) == num_ranks ? 1 : 0;
      }
    });
  }
  for (std::thread& each : ranks) {
    each.join();
  }
  out[0] = num_reads;
  out[1] = store.num_asked / num_ranks;
  out[2] = store.longest;
  out[3] = num_right;
}
