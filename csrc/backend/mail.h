// Messages between the ranks of one host, in memory that they share.
//
// Note [Messages]
// From each rank to each other one there is a channel: a ring of bytes, how many have been written to it, and how many
// have been read. A message is a header and its bytes. Who sends writes as much as there is room for; who receives
// reads as much as there is, once it expects a message from that rank. A message of another tag is read too, and kept
// until it is asked for. So a small message has gone before anybody expects it, and a large one when it was read.
// Nobody waits for a channel. What can be done at once is done by the call. A thread does the rest: it sleeps until
// another rank, which has written or read, rings this rank's bell.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/rounds.h"
#include "backend/work.h"
#include "transport/progress_thread.h"
#include "transport/shared_memory.h"
#include "transport/waiting.h"

namespace fastsync {

class MessageWork;

// Thread-safe. No call waits.
class Mail : public std::enable_shared_from_this<Mail> {
 public:
  using WorkPtr = c10::intrusive_ptr<MessageWork>;

  // How many bytes a rank needs in its part of the memory.
  static int64_t bytes_of_a_rank(int64_t size);

  // Takes memory of zeros, in which each rank has a part of so many bytes. A rank's channels begin at the offset.
  Mail(std::shared_ptr<Rounds> rounds, std::shared_ptr<SharedMemory> memory, int64_t part_bytes, int64_t offset);

  // The tensor lies in one piece. A message from kAnyRank may come from every rank.
  static constexpr int kAnyRank = -1;
  WorkPtr send(const at::Tensor& tensor, int to, int tag, std::chrono::milliseconds timeout);
  WorkPtr receive(const at::Tensor& tensor, int from, int tag, std::chrono::milliseconds timeout);

  // Has all messages under way fail, and those that are still called. Others hear that this rank can do no more.
  void fail(const std::string& why);
  // The same, as the last call. Others hear that this rank has left.
  void close();
  // Says whom a message waits for, and how far that rank has got.
  std::string described(int peer) const;

 private:
  struct Channel;
  struct Header {
    int64_t tag;
    int64_t bytes;
  };
  struct Kept {
    int64_t tag;
    std::vector<std::byte> bytes;
  };
  struct Reading {  // a message that has been read in part
    Header header;
    int64_t done = 0;
    WorkPtr work;  // null if nobody has asked for the message
    std::vector<std::byte> kept;
    bool is_dropped = false;  // whether nobody may have it, because it has another size
  };
  struct Peer {
    std::deque<WorkPtr> to_send;
    int64_t sent = 0;  // how much of the first one, with its header
    std::optional<Reading> reading;
    std::deque<Kept> kept;
  };
  // Works that have ended, and are told so when the mutex is free.
  using Ended = std::vector<std::pair<WorkPtr, std::exception_ptr>>;

  Channel& channel(int64_t from, int64_t to) const;
  SharedNumber& bell_of(int64_t rank) const;
  void copy_in(Channel& channel, int64_t at, const std::byte* from, int64_t bytes) const;
  void copy_out(const Channel& channel, int64_t at, std::byte* to, int64_t bytes) const;

  // The next methods want the mutex.
  void write_to(int64_t rank, Ended& ended);
  void read_from(int64_t rank, Ended& ended);
  Reading begin_reading(int64_t rank, const Channel& ring, int64_t at, Ended& ended);
  void hand_out_kept(int64_t rank, Ended& ended);
  WorkPtr take_wanted(int64_t from, int64_t tag);
  bool is_wanted_from(int64_t rank) const;
  bool is_idle() const;
  void advance(Ended& ended);
  void end_lost(const std::vector<std::string>& losses, Ended& ended);
  void end_all(const std::string& why);
  void keep_going();

  std::vector<std::string> losses_of_ranks() const;
  void drive();
  static void tell(const Ended& ended);

  const std::shared_ptr<Rounds> rounds_;
  const std::shared_ptr<SharedMemory> memory_;
  const int64_t part_bytes_;
  const int64_t offset_;
  const int64_t size_;
  const int64_t rank_;
  const int64_t room_;  // how many bytes a channel holds
  Waiting waiting_;
  ProgressThread thread_;
  std::mutex mutex_;  // guards the next
  std::vector<Peer> peers_;
  std::list<WorkPtr> wanted_;  // messages that this rank expects, in the order of the calls
  uint64_t num_messages_ = 0;
  bool is_driven_ = false;  // whether the thread is at work
};

class MessageWork final : public HostWork {
 public:
  MessageWork(std::weak_ptr<Mail> mail, c10d::OpType type, const at::Tensor& tensor, int own, int peer, int tag,
              uint64_t number, std::chrono::milliseconds timeout);

  // Without a timeout it is that of the group.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  int sourceRank() const override { return peer_; }

 private:
  friend class Mail;

  const char* name() const;
  // Says where the message comes from, and its size. Returns an error if the tensor has another one.
  std::exception_ptr begin(int64_t from, int64_t bytes);

  const std::weak_ptr<Mail> mail_;
  const at::Tensor tensor_;
  int peer_;  // kAnyRank until a message has come
  const int tag_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace fastsync
