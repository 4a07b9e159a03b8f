#include "backend/mail.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace fastsync {

namespace {

constexpr int64_t kMostRoom = 64 << 10;  // of a channel
constexpr int64_t kLeastRoom = 1 << 10;  // of a channel
constexpr int64_t kRoomOfAll = 4 << 20;  // of all channels together, unless there are very many
constexpr int64_t kApart = 256;          // bytes between what different ranks write
constexpr std::chrono::milliseconds kLookEvery(100);

int64_t room_of_a_channel(int64_t size) {
  return std::clamp(kRoomOfAll / (size * size), kLeastRoom, kMostRoom) / kApart * kApart;
}

std::exception_ptr error_of(const std::string& what) {
  return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, what));
}

}  // namespace

struct alignas(kApart) Mail::Channel {
  std::atomic<int64_t> written;  // bytes, in all
  alignas(kApart / 2) std::atomic<int64_t> read;

  std::byte* data() { return reinterpret_cast<std::byte*>(this + 1); }
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(this + 1); }
};

// A rank's part has its bell, and then its channel to each rank.
int64_t Mail::bytes_of_a_rank(int64_t size) {
  static_assert(sizeof(SharedNumber) <= kApart);
  const auto channel = static_cast<int64_t>(sizeof(Channel)) + room_of_a_channel(size);
  return kApart + size * channel;
}

Mail::Mail(std::shared_ptr<Rounds> rounds, std::shared_ptr<SharedMemory> memory, int64_t part_bytes, int64_t offset)
    : rounds_(std::move(rounds)),
      memory_(std::move(memory)),
      part_bytes_(part_bytes),
      offset_(offset),
      size_(rounds_->size()),
      rank_(rounds_->rank()),
      room_(room_of_a_channel(size_)),
      peers_(size_) {}

Mail::Channel& Mail::channel(int64_t from, int64_t to) const {
  const int64_t bytes = static_cast<int64_t>(sizeof(Channel)) + room_;
  return *reinterpret_cast<Channel*>(memory_->data() + from * part_bytes_ + offset_ + kApart + to * bytes);
}

SharedNumber& Mail::bell_of(int64_t rank) const {
  return *reinterpret_cast<SharedNumber*>(memory_->data() + rank * part_bytes_ + offset_);
}

void Mail::copy_in(Channel& channel, int64_t at, const std::byte* from, int64_t bytes) const {
  const int64_t begin = at % room_;
  const int64_t before_end = std::min(bytes, room_ - begin);
  std::memcpy(channel.data() + begin, from, before_end);
  std::memcpy(channel.data(), from + before_end, bytes - before_end);
}

void Mail::copy_out(const Channel& channel, int64_t at, std::byte* to, int64_t bytes) const {
  const int64_t begin = at % room_;
  const int64_t before_end = std::min(bytes, room_ - begin);
  std::memcpy(to, channel.data() + begin, before_end);
  std::memcpy(to + before_end, channel.data(), bytes - before_end);
}

Mail::WorkPtr Mail::send(const at::Tensor& tensor, int to, int tag, std::chrono::milliseconds timeout) {
  rounds_->check("send");
  Ended ended;
  WorkPtr work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    work = c10::make_intrusive<MessageWork>(weak_from_this(), c10d::OpType::SEND, tensor, static_cast<int>(rank_), to,
                                            tag, ++num_messages_, timeout);
    peers_[to].to_send.push_back(work);
    write_to(to, ended);
    keep_going();
  }
  tell(ended);
  return work;
}

Mail::WorkPtr Mail::receive(const at::Tensor& tensor, int from, int tag, std::chrono::milliseconds timeout) {
  rounds_->check("recv");
  Ended ended;
  WorkPtr work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto type = from == kAnyRank ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
    work = c10::make_intrusive<MessageWork>(weak_from_this(), type, tensor, static_cast<int>(rank_), from, tag,
                                            ++num_messages_, timeout);
    wanted_.push_back(work);
    for (int64_t rank = 0; rank < size_; ++rank) {
      read_from(rank, ended);
    }
    keep_going();
  }
  tell(ended);
  return work;
}

void Mail::write_to(int64_t rank, Ended& ended) {
  Peer& peer = peers_[rank];
  Channel& ring = channel(rank_, rank);
  const int64_t before = ring.written.load(std::memory_order_relaxed);
  const int64_t limit = ring.read.load(std::memory_order_acquire) + room_;
  int64_t written = before;
  constexpr auto kHeader = static_cast<int64_t>(sizeof(Header));
  while (!peer.to_send.empty() && limit - written >= (peer.sent == 0 ? kHeader : 1)) {
    const WorkPtr& work = peer.to_send.front();
    const auto bytes = static_cast<int64_t>(work->tensor_.nbytes());
    if (peer.sent == 0) {
      const Header header{work->tag_, bytes};
      copy_in(ring, written, reinterpret_cast<const std::byte*>(&header), kHeader);
      written += kHeader;
      peer.sent = kHeader;
    }
    const int64_t done = peer.sent - kHeader;
    const int64_t now = std::min(bytes - done, limit - written);
    copy_in(ring, written, static_cast<const std::byte*>(work->tensor_.const_data_ptr()) + done, now);
    written += now;
    peer.sent += now;
    if (peer.sent < kHeader + bytes) {
      break;
    }
    ended.emplace_back(std::move(peer.to_send.front()), nullptr);
    peer.to_send.pop_front();
    peer.sent = 0;
  }
  if (written > before) {
    ring.written.store(written, std::memory_order_release);
    bell_of(rank).raise_by_one();
  }
}

// Messages of one tag are taken in the order in which they were sent, so those that were kept come first.
void Mail::hand_out_kept(int64_t rank, Ended& ended) {
  auto& kept = peers_[rank].kept;
  for (auto message = kept.begin(); message != kept.end();) {
    const WorkPtr work = take_wanted(rank, message->tag);
    if (!work) {
      ++message;
      continue;
    }
    const auto bytes = static_cast<int64_t>(message->bytes.size());
    const std::exception_ptr error = work->begin(rank, bytes);
    if (!error && bytes > 0) {
      std::memcpy(work->tensor_.data_ptr(), message->bytes.data(), bytes);
    }
    ended.emplace_back(work, error);
    message = kept.erase(message);
  }
}

void Mail::read_from(int64_t rank, Ended& ended) {
  Peer& peer = peers_[rank];
  hand_out_kept(rank, ended);
  Channel& ring = channel(rank, rank_);
  const int64_t before = ring.read.load(std::memory_order_relaxed);
  const int64_t written = ring.written.load(std::memory_order_acquire);
  int64_t read = before;
  constexpr auto kHeader = static_cast<int64_t>(sizeof(Header));
  while (peer.reading ? (read < written || peer.reading->done == peer.reading->header.bytes)
                      : (written - read >= kHeader && is_wanted_from(rank))) {
    if (!peer.reading) {
      peer.reading = begin_reading(rank, ring, read, ended);
      read += kHeader;
    }
    Reading& reading = *peer.reading;
    std::byte* const into =
        reading.work ? static_cast<std::byte*>(reading.work->tensor_.data_ptr()) : reading.kept.data();
    const int64_t now = std::min(reading.header.bytes - reading.done, written - read);
    copy_out(ring, read, into + reading.done, now);
    read += now;
    reading.done += now;
    if (reading.done < reading.header.bytes) {
      break;
    }
    if (reading.work) {
      ended.emplace_back(std::move(reading.work), nullptr);
    } else if (!reading.is_dropped) {
      peer.kept.push_back({reading.header.tag, std::move(reading.kept)});
      hand_out_kept(rank, ended);
    }
    peer.reading.reset();
  }
  if (read > before) {
    ring.read.store(read, std::memory_order_release);
    bell_of(rank).raise_by_one();
  }
}

Mail::Reading Mail::begin_reading(int64_t rank, const Channel& ring, int64_t at, Ended& ended) {
  Reading next;
  copy_out(ring, at, reinterpret_cast<std::byte*>(&next.header), sizeof(Header));
  next.work = take_wanted(rank, next.header.tag);
  const std::exception_ptr error = next.work ? next.work->begin(rank, next.header.bytes) : nullptr;
  if (error) {
    ended.emplace_back(std::exchange(next.work, nullptr), error);
    next.is_dropped = true;
  }
  next.kept.resize(next.work ? 0 : next.header.bytes);
  return next;
}

Mail::WorkPtr Mail::take_wanted(int64_t from, int64_t tag) {
  const auto found = std::ranges::find_if(wanted_, [&](const WorkPtr& work) {
    return work->tag_ == tag && (work->peer_ == from || work->peer_ == kAnyRank);
  });
  if (found == wanted_.end()) {
    return {};
  }
  WorkPtr work = std::move(*found);
  wanted_.erase(found);
  return work;
}

bool Mail::is_wanted_from(int64_t rank) const {
  return rank != rank_ && std::ranges::any_of(wanted_, [&](const WorkPtr& work) {
           return work->peer_ == rank || work->peer_ == kAnyRank;
         });
}

bool Mail::is_idle() const {
  return wanted_.empty() && std::ranges::all_of(peers_, [](const Peer& peer) {
           return peer.to_send.empty() && !(peer.reading && peer.reading->work);
         });
}

void Mail::advance(Ended& ended) {
  for (int64_t rank = 0; rank < size_; ++rank) {
    write_to(rank, ended);
    read_from(rank, ended);
  }
}

void Mail::keep_going() {
  if (!is_driven_ && !is_idle()) {
    thread_.post(c10::kCPU, [self = shared_from_this()] { self->drive(); });
    is_driven_ = true;
  }
}

void Mail::drive() {
  SharedNumber& bell = bell_of(rank_);
  auto look_at = Waiting::Clock::now() + kLookEvery;
  while (true) {
    const int64_t seen = bell.value.load(std::memory_order_acquire);
    Ended ended;
    const bool looks = Waiting::Clock::now() >= look_at;
    // Before what they have sent is read: a rank may send its last message, and leave.
    const std::vector<std::string> losses = looks ? losses_of_ranks() : std::vector<std::string>();
    bool goes_on = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      advance(ended);
      if (looks) {
        end_lost(losses, ended);
        look_at = Waiting::Clock::now() + kLookEvery;
      }
      is_driven_ = goes_on = !is_idle();
    }
    tell(ended);
    if (!goes_on) {
      return;
    }
    waiting_.until(bell, seen + 1, /*has_cores=*/false, look_at, [] {});
  }
}

std::vector<std::string> Mail::losses_of_ranks() const {
  std::vector<std::string> losses;
  for (int64_t rank = 0; rank < size_; ++rank) {
    losses.push_back(rank == rank_ ? "" : rounds_->loss_of(rank));
  }
  return losses;
}

void Mail::end_lost(const std::vector<std::string>& losses, Ended& ended) {
  const bool are_all_lost = std::ranges::count(losses, "") == 1;  // but this one
  const auto fail = [&](WorkPtr& work, const std::string& why) {
    ended.emplace_back(std::move(work), error_of(c10::str("fastsync: ", work->name(), ": ", why)));
  };
  for (auto work = wanted_.begin(); work != wanted_.end();) {
    const int64_t from = (*work)->peer_;
    const std::string& why = losses[from == kAnyRank ? (rank_ + 1) % size_ : from];
    const bool is_lost = from == kAnyRank ? are_all_lost : !why.empty();
    if (is_lost) {
      fail(*work, why);
    }
    work = is_lost ? wanted_.erase(work) : std::next(work);
  }
  for (int64_t rank = 0; rank < size_; ++rank) {
    Peer& peer = peers_[rank];
    if (losses[rank].empty()) {
      continue;
    }
    for (WorkPtr& work : peer.to_send) {
      fail(work, losses[rank]);
    }
    peer.to_send.clear();
    if (peer.reading && peer.reading->work) {
      fail(peer.reading->work, losses[rank]);
      peer.reading->is_dropped = true;
    }
  }
}

void Mail::fail(const std::string& why) {
  rounds_->fail(why);
  end_all(why);
}

void Mail::close() {
  if (rounds_->is_here()) {
    end_all("the process group was destroyed");
  }
}

void Mail::end_all(const std::string& why) {
  Ended ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fail = [&](WorkPtr& work) { ended.emplace_back(std::move(work), error_of("fastsync: " + why)); };
    std::ranges::for_each(wanted_, fail);
    wanted_.clear();
    for (Peer& peer : peers_) {
      std::ranges::for_each(peer.to_send, fail);
      peer.to_send.clear();
      if (peer.reading && peer.reading->work) {
        fail(peer.reading->work);
      }
      peer.reading.reset();
    }
  }
  bell_of(rank_).raise_by_one();  // the thread has no more to do
  tell(ended);
}

std::string Mail::described(int peer) const {
  return peer == kAnyRank ? "a message from any rank" : c10::str("rank ", peer, "; ", rounds_->where_is(peer));
}

void Mail::tell(const Ended& ended) {
  for (const auto& [work, error] : ended) {
    work->complete(error);
  }
}

MessageWork::MessageWork(std::weak_ptr<Mail> mail, c10d::OpType type, const at::Tensor& tensor, int own, int peer,
                         int tag, uint64_t number, std::chrono::milliseconds timeout)
    : HostWork(own, type, type == c10d::OpType::SEND ? "fastsync:send" : "fastsync:recv", {tensor}, {{tensor}}, number),
      mail_(std::move(mail)),
      tensor_(tensor),
      peer_(peer),
      tag_(tag),
      timeout_(timeout) {}

const char* MessageWork::name() const { return opType_ == c10d::OpType::SEND ? "send" : "recv"; }

std::exception_ptr MessageWork::begin(int64_t from, int64_t bytes) {
  peer_ = static_cast<int>(from);
  const auto expected = static_cast<int64_t>(tensor_.nbytes());
  return bytes == expected ? nullptr
                           : error_of(c10::str("fastsync: recv: rank ", from, " has sent ", bytes,
                                               " bytes, but this rank expects ", expected));
}

// After a time-out nothing more comes: what is under way would still write to tensors.
bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const auto limit = timeout == kNoTimeout ? timeout_ : timeout;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait_for(lock, limit, [this] { return completed_; });
  }
  const auto mail = isCompleted() ? nullptr : mail_.lock();
  if (mail) {
    mail->fail(c10::str(name(), ": Timed out waiting ", seconds_of(limit), " s for ", mail->described(peer_)));
  }
  return Work::wait();
}

}  // namespace fastsync
