// A roll call finds out which ranks live, and where they are.
//
// Note [Roll calls]
//   A wait that fails mostly fails on all ranks. If each of them read all heartbeats, a store of a thousand ranks would
//   send millions. So the first rank of a roll call reads them for all: twice, some seconds apart. Then it begins the
//   next roll call, and leaves a summary, which is short, because ranks that are at the same place share its words. The
//   other ranks wait for it. If none comes, the reader is lost, and one of them takes its place. A summary that comes
//   much sooner than a rank's own reading would have ended is older than its question, so that rank goes on to the next
//   roll call. Nobody reads what a reader deletes: the keys of the roll call before the one before.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/rank_state.h"

namespace fastsync {

struct RollCall {
  using Clock = std::chrono::steady_clock;
  using Duration = std::chrono::milliseconds;

  std::string key;            // the first part of its keys in the store
  int64_t rank;               // this rank
  Duration listen_for;        // from the first read to the second
  Duration patience;          // how long others wait for the summary after that
  Duration tolerance;         // how much older than the question an answer may be; at most listen_for
  bool only_answers = false;  // whether heartbeats that have not changed tell nothing

  // Takes part in the roll call that is under way, or in a new one. Connection::store() has the functions of
  // c10d::Store, and read() returns all heartbeats, by rank. global_rank stays unset.
  template <class Connection, class Read>
  std::vector<RankState> run(const Connection& connection, const Read& read) const {
    const std::string own = std::to_string(rank);
    for (;;) {
      const int64_t number = connection.store()->add(key + "/calls", 0);
      std::string reader;
      while ((reader = connection.store()->compareSet(key_of("reader", number), reader, own)) != own) {
        if (auto states = summary(connection, number)) {
          return *std::move(states);
        }
        if (connection.store()->add(key + "/calls", 0) != number) {
          break;
        }
      }
      if (reader == own) {
        return read_for_all(connection, number, read);
      }
    }
  }

 private:
  // Waits for it. Returns nothing if none comes, or if it was there too soon.
  template <class Connection>
  std::optional<std::vector<RankState>> summary(const Connection& connection, int64_t number) const {
    constexpr Duration kPause(100);
    const std::string kNone = "none";
    const std::string place = key_of("summary", number);
    std::this_thread::sleep_for(listen_for - tolerance);
    if (tolerance < listen_for && connection.store()->check({place})) {
      return std::nullopt;
    }
    std::this_thread::sleep_for(tolerance);
    for (const auto end = Clock::now() + patience; Clock::now() < end; std::this_thread::sleep_for(kPause)) {
      // Of a key that is not there it returns what was expected, where get would wait.
      if (const std::string text = connection.store()->compareSet(place, kNone, kNone); text != kNone) {
        return rank_states_from(text);
      }
    }
    return std::nullopt;
  }

  template <class Connection, class Read>
  std::vector<RankState> read_for_all(const Connection& connection, int64_t number, const Read& read) const {
    const std::vector<std::string> before = read();
    std::this_thread::sleep_for(listen_for);
    std::vector<RankState> states = rank_states_of(before, read(), only_answers);
    connection.store()->add(key + "/calls", 1);  // first: if this rank is lost now, the others begin the next one
    connection.store()->set(key_of("summary", number), to_text(states));
    for (const char* const what : {"reader", "summary"}) {
      connection.store()->deleteKey(key_of(what, number - 2));
    }
    return states;
  }

  std::string key_of(const char* what, int64_t number) const { return key + "/" + what + "/" + std::to_string(number); }
};

}  // namespace fastsync
