// A roll call finds out which ranks live, and where they are.
//
// Note [Roll calls]
//   A wait that fails mostly fails on all ranks. If each of them read all heartbeats, a store of a thousand ranks would
//   send millions. So the first rank of a roll call reads them for all: twice, some seconds apart. Then it leaves a
//   summary, which is short, because ranks that are at the same place share its words. The other ranks wait for it. If
//   none is left, the reader is lost, and one of them takes its place. A rank that asks while a roll call is under way
//   gets its answer, which may be older than the question by those seconds.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
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
  bool only_answers = false;  // whether heartbeats that have not changed tell nothing

  // Takes part in the roll call that is under way, or in a new one. Connection::store() has the functions of
  // c10d::Store, and read() returns all heartbeats, by rank. global_rank stays unset.
  template <class Connection, class Read>
  std::vector<RankState> run(const Connection& connection, const Read& read) const {
    constexpr Duration kPause(100);
    const int64_t number = connection.store()->add(key + "/calls", 0);
    const std::string own = std::to_string(rank);
    std::string reader;
    while ((reader = connection.store()->compareSet(key_of("reader", number), reader, own)) != own) {
      std::this_thread::sleep_for(listen_for);
      for (const auto end = Clock::now() + patience; Clock::now() < end; std::this_thread::sleep_for(kPause)) {
        if (connection.store()->check({key_of("summary", number)})) {
          return rank_states_from(connection.store()->get_to_str(key_of("summary", number)));
        }
      }
    }
    const std::vector<std::string> before = read();
    std::this_thread::sleep_for(listen_for);
    std::vector<RankState> states = rank_states_of(before, read(), only_answers);
    connection.store()->set(key_of("summary", number), to_text(states));
    connection.store()->add(key + "/calls", 1);
    for (const char* const what : {"reader", "summary"}) {
      connection.store()->deleteKey(key_of(what, number - 1));
    }
    return states;
  }

 private:
  std::string key_of(const char* what, int64_t number) const { return key + "/" + what + "/" + std::to_string(number); }
};

}  // namespace fastsync
