// Runs the threads of a block by turns on one thread of the host: each until it waits for others or leaves.
#include <ucontext.h>
#include <array>
#include <csetjmp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {
namespace {

constexpr size_t kStackBytes = 1 << 18;
constexpr unsigned kWarp = 32;

enum class State { kRuns, kWaitsForBlock, kWaitsForWarp, kLeft };

struct Fiber {
  State state;
  source_location where;  // it waits
  unsigned mask;          // of the lanes that it waits for, what it brings, and what all of them have brought
  unsigned value;
  std::array<unsigned, kWarp> values;
  bool has_begun = false;
  jmp_buf resume;
  ucontext_t begin;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
};

std::mutex mutex;  // one launch at a time
bool goes_down = false;
std::vector<std::unique_ptr<Fiber>> fibers;
const std::function<void()>* body;
jmp_buf scheduler;
std::string failure;

Fiber& current() { return *fibers[threadIdx.x]; }

void fail(const std::string& what) {
  if (failure.empty()) {
    failure = "block " + std::to_string(blockIdx.x) + ": " + what;
  }
}

std::string thread_at(unsigned thread) {
  const source_location& where = fibers[thread]->where;
  return "thread " + std::to_string(thread) + " waits at " + where.file_name() + ":" + std::to_string(where.line());
}

bool is_same(const source_location& a, const source_location& b) {
  return a.line() == b.line() && a.column() == b.column() && a.file_name() == b.file_name();
}

// ---- hand-over. makecontext begins a fiber; from then on jumps do, which need no system call ------------------------

void hand_over(State state) {
  Fiber& fiber = current();
  fiber.state = state;
  if (_setjmp(fiber.resume) == 0) {
    _longjmp(scheduler, 1);
  }
}

void live() {
  for (;;) {
    (*body)();
    hand_over(State::kLeft);
  }
}

void begin(Fiber& fiber) {
  fiber.has_begun = true;
  getcontext(&fiber.begin);
  fiber.begin.uc_stack.ss_sp = fiber.stack.get();
  fiber.begin.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber.begin, live, 0);
  setcontext(&fiber.begin);
}

void run(unsigned thread) {
  threadIdx.x = thread;
  if (_setjmp(scheduler) == 0) {
    current().has_begun ? _longjmp(current().resume, 1) : begin(current());
  }
}

// ---- who may go on --------------------------------------------------------------------------------------------------

// Whether all the lanes that this one names wait for the same.
bool is_complete(unsigned thread) {
  const Fiber& own = *fibers[thread];
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    const unsigned other = thread / kWarp * kWarp + lane;
    if ((own.mask >> lane & 1) == 0) {
      continue;
    }
    if (other >= fibers.size() || fibers[other]->state != State::kWaitsForWarp || fibers[other]->mask != own.mask ||
        !is_same(fibers[other]->where, own.where)) {
      return false;
    }
  }
  return (own.mask >> thread % kWarp & 1) != 0;
}

void release_lanes(unsigned thread) {
  const unsigned mask = fibers[thread]->mask;
  std::array<unsigned, kWarp> values{};
  std::vector<Fiber*> lanes;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) != 0) {
      lanes.push_back(fibers[thread / kWarp * kWarp + lane].get());
      values[lane] = lanes.back()->value;
    }
  }
  for (Fiber* lane : lanes) {
    lane->values = values;
    lane->state = State::kRuns;
  }
}

// Returns what the lanes have brought; zero for those that are not in the mask.
const std::array<unsigned, kWarp>& exchange_over_warp(unsigned mask, unsigned value, source_location where) {
  current().where = where;
  current().mask = mask;
  current().value = value;
  hand_over(State::kWaitsForWarp);
  return current().values;
}

bool release_warps() {
  bool any = false;
  for (unsigned thread = 0; thread < fibers.size(); ++thread) {
    if (fibers[thread]->state == State::kWaitsForWarp && is_complete(thread)) {
      release_lanes(thread);
      any = true;
    }
  }
  return any;
}

std::string why_stuck() {
  for (unsigned thread = 0; thread < fibers.size(); ++thread) {
    if (fibers[thread]->state == State::kWaitsForWarp) {
      return thread_at(thread) + " for lanes that do not come";
    }
  }
  const auto waits = [](const auto& fiber) { return fiber->state == State::kWaitsForBlock; };
  const auto first = static_cast<unsigned>(std::find_if(fibers.begin(), fibers.end(), waits) - fibers.begin());
  for (unsigned thread = 0; thread < fibers.size(); ++thread) {
    if (!waits(fibers[thread])) {
      return thread_at(first) + ", but thread " + std::to_string(thread) + " has left";
    }
    if (!is_same(fibers[thread]->where, fibers[first]->where)) {
      return thread_at(first) + ", but " + thread_at(thread);
    }
  }
  return "";
}

void release_block() {
  const std::string reason = why_stuck();
  if (!reason.empty()) {
    return fail(reason);
  }
  for (const auto& fiber : fibers) {
    fiber->state = State::kRuns;
  }
}

bool all_have_left() {
  return std::all_of(fibers.begin(), fibers.end(), [](const auto& fiber) { return fiber->state == State::kLeft; });
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

unsigned in_turn(unsigned i, size_t count) { return goes_down ? static_cast<unsigned>(count) - 1 - i : i; }

void run_block() {
  for (const auto& fiber : fibers) {
    fiber->state = State::kRuns;
  }
  while (failure.empty() && !all_have_left()) {
    for (unsigned i = 0; i < fibers.size(); ++i) {
      const unsigned thread = in_turn(i, fibers.size());
      if (fibers[thread]->state == State::kRuns) {
        run(thread);
      }
    }
    if (!all_have_left() && !release_warps()) {
      release_block();
    }
  }
}

}  // namespace

void set_descending(bool is_descending) { goes_down = is_descending; }

void wait_for_block(source_location where) {
  current().where = where;
  hand_over(State::kWaitsForBlock);
}

unsigned max_over_warp(unsigned mask, unsigned value, source_location where) {
  const auto& values = exchange_over_warp(mask, value, where);
  return *std::max_element(values.begin(), values.end());
}

// The last lanes have none above them, and keep their own values.
unsigned from_lane_above(unsigned mask, unsigned value, unsigned distance, source_location where) {
  const auto& values = exchange_over_warp(mask, value, where);
  const unsigned lane = threadIdx.x % kWarp + distance;
  if (lane >= kWarp) {
    return value;
  }
  if ((mask >> lane & 1) == 0) {
    fail("lane " + std::to_string(lane) + " brings no value at " + where.file_name() + ":" +
         std::to_string(where.line()));
  }
  return values[lane];
}

cudaError_t launch(dim3 grid, dim3 block, size_t argument_bytes, const std::function<void()>& call) {
  const std::lock_guard<std::mutex> lock(mutex);
  failure.clear();
  if (grid.x == 0 || block.x == 0 || block.x > kMaxThreads || argument_bytes > kMaxArgumentBytes) {
    failure = std::to_string(grid.x) + " blocks of " + std::to_string(block.x) + " threads, arguments of " +
              std::to_string(argument_bytes) + " bytes";
    return cudaErrorInvalidValue;
  }
  while (fibers.size() < block.x) {
    fibers.push_back(std::make_unique<Fiber>());
  }
  fibers.resize(block.x);
  body = &call;
  gridDim = grid;
  blockDim = block;
  for (unsigned i = 0; i < grid.x && failure.empty(); ++i) {
    blockIdx.x = in_turn(i, grid.x);
    run_block();
  }
  if (failure.empty()) {
    return cudaSuccess;
  }
  fibers.clear();  // some are in the middle of their work
  return cudaErrorLaunchFailure;
}

}  // namespace emulator

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return emulator::failure.c_str(); }

// ---- what -fsanitize=alignment,bounds finds: addresses that the device would refuse, indices beyond an array --------

namespace {

struct Place {
  const char* file;
  uint32_t line, column;
};

void report(const Place* place, const std::string& what) {
  emulator::fail(what + " at " + place->file + ":" + std::to_string(place->line) + " by thread " +
                 std::to_string(threadIdx.x));
}

}  // namespace

extern "C" {
void __ubsan_handle_type_mismatch_v1(const Place* place, uintptr_t /*address*/) { report(place, "misaligned address"); }
void __ubsan_handle_out_of_bounds(const Place* place, uintptr_t index) {
  report(place, "index " + std::to_string(index) + " out of bounds");
}
}
