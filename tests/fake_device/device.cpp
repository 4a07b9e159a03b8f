#include "device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace fake_device {
namespace {

thread_local c10::DeviceIndex the_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> the_streams = {};  // 0 is the default stream

// As CUDA's: two pools of streams that are handed out again and again, and streams of one's own beyond them.
constexpr int kPoolSize = 32;
std::array<std::atomic<int>, kNumDevices> next_of_pool = {};
std::array<std::atomic<int>, kNumDevices> next_of_urgent_pool = {};
std::atomic<int> next_of_own = 1 + 2 * kPoolSize;

std::atomic<bool> is_broken = false;
std::atomic<size_t> most_bytes = std::numeric_limits<size_t>::max();

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : the_device; }

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Device getDevice() const override { return {kType, the_device}; }
  void setDevice(c10::Device device) const override { the_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { the_device = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_urgent) const override {
    auto& next = (is_urgent ? next_of_urgent_pool : next_of_pool)[index_of(device)];
    return make_stream(index_of(device), 1 + (is_urgent ? kPoolSize : 0) + next++ % kPoolSize);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override { return new_stream(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device());
    the_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    Event event;
    fake_device::record(event, stream);
    return query(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_on_host(stream, "Stream.synchronize"); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (c10::StreamId id = 0; id < next_of_own; ++id) {
      wait_on_host(make_stream(device, id), "synchronize");
    }
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event{{}, {}, flag == c10::EventFlag::BACKEND_DEFAULT};
    }
    fake_device::record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (is_broken) {
      throw BrokenDevice();
    }
    if (event != nullptr) {
      fake_device::block(*static_cast<Event*>(event), stream);
    }
  }
  // Not `override`: torch 2.11 does not ask.
  bool isStreamCapturing(const c10::Stream& /*stream*/) const { return is_capturing(); }
  bool queryEvent(void* event) const override { return event == nullptr || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_on_host(static_cast<Event*>(event)->clock, "Event.synchronize");
    }
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    const auto& begin = *static_cast<Event*>(from);
    const auto& end = *static_cast<Event*>(to);
    TORCH_CHECK(begin.is_timed && end.is_timed, "elapsedTime of an event that was made without timing");
    return std::chrono::duration<double, std::milli>(end.time - begin.time).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= most_bytes, "out of memory: no ", bytes, " bytes");
    const auto device = current_device();
    void* data = bytes == 0 ? nullptr : fake_device::allocate(bytes, current_stream(device));
    return {data, data, raw_deleter(), device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      if (data != nullptr) {
        fake_device::free(data);
      }
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Host memory that the device may read while the host goes on.
struct PinnedMemory final : c10::Allocator {
  static PinnedMemory& get() {
    static auto& memory = *new PinnedMemory();
    return memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes + 1);
    const std::lock_guard<std::mutex> lock(mutex);
    blocks[static_cast<char*>(data)] = bytes + 1;
    return {data, data, raw_deleter(), c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      const std::lock_guard<std::mutex> lock(get().mutex);
      get().blocks.erase(static_cast<char*>(data));
      std::free(data);
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool holds(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto* place = static_cast<const char*>(data);
    auto found = blocks.upper_bound(const_cast<char*>(place));
    return found != blocks.begin() && place < std::prev(found)->first + std::prev(found)->second;
  }

  std::mutex mutex;
  std::map<char*, size_t> blocks;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return the_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { the_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(the_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }
};

const bool is_registered = [] {
  c10::SetAllocator(kType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

c10::Stream current_stream(c10::Device device) { return make_stream(index_of(device), the_streams[index_of(device)]); }

void set_broken(bool is_broken_now) { is_broken = is_broken_now; }

void set_most_bytes(size_t bytes) { most_bytes = bytes; }

c10::Stream new_stream(c10::DeviceIndex device) { return make_stream(device, next_of_own++); }

c10::Device current_device() { return {kType, the_device}; }

c10::Allocator* allocator() {
  static auto& memory = *new Memory();
  return &memory;
}

bool is_pinned(const void* data) { return PinnedMemory::get().holds(data); }

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

// Row by row where there are gaps, unless there are so many rows that all between them counts as well.
void add_touches(std::vector<Touch>& touches, const at::Tensor& tensor, bool is_written) {
  constexpr int64_t kMaxRows = 64;
  if (tensor.numel() == 0) {
    return;
  }
  const auto size = static_cast<int64_t>(tensor.element_size());
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.dim() == 2 && tensor.stride(1) == 1 && tensor.size(0) <= kMaxRows && !tensor.is_contiguous()) {
    for (int64_t row = 0; row < tensor.size(0); ++row) {
      touches.push_back({data + row * tensor.stride(0) * size, tensor.size(1) * size, is_written});
    }
    return;
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  touches.push_back({data, (last + 1) * size, is_written});
}

}  // namespace fake_device
