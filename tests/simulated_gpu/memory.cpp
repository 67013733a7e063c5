// Devices of type "cuda" for a CPU build of torch: memory, streams, events and what torch asks of a device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "memory.h"

namespace simulated {
namespace {

thread_local c10::DeviceIndex device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> streams;  // the current ones; 0 is the default stream
std::atomic<c10::StreamId> last_stream{0};

std::mutex owed_mutex;
std::map<c10::Stream, LateWork, bool (*)(const c10::Stream&, const c10::Stream&)> owed(
    [](const c10::Stream& a, const c10::Stream& b) {
      return std::pair(a.device_index(), a.id()) < std::pair(b.device_index(), b.id());
    });

c10::Device cuda(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, cuda(index), id); }

// ---- memory: fresh memory is never zeros --------------------------------------------------------------------------------

void* fresh(size_t bytes) {
  void* memory = nullptr;
  if (bytes > 0) {
    TORCH_CHECK(posix_memalign(&memory, 512, bytes) == 0, "CUDA out of memory");
    std::memset(memory, 0xFF, bytes);  // NaN in each floating-point format
  }
  return memory;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = fresh(bytes);
    return {memory, memory, &std::free, cuda(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} device_memory;

struct PinnedMemory final : at::HostAllocator {
  static inline std::mutex mutex;
  static inline std::map<const char*, size_t> blocks;

  static void release(void* memory) {
    {
      std::lock_guard lock(mutex);
      blocks.erase(static_cast<const char*>(memory));
    }
    std::free(memory);
  }
  static bool holds(const void* address) {
    std::lock_guard lock(mutex);
    auto next = blocks.upper_bound(static_cast<const char*>(address));
    if (next == blocks.begin()) return false;
    auto [start, bytes] = *std::prev(next);
    return address < start + bytes;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = fresh(bytes);
    std::lock_guard lock(mutex);
    if (memory != nullptr) blocks[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_memory;

// ---- late copies to the host --------------------------------------------------------------------------------------------

std::mutex copies_mutex;
std::vector<std::function<void()>> copies;  // each writes one destination
uint64_t copies_arrived = 0;

}  // namespace

c10::Allocator* device_allocator() { return &device_memory; }
bool is_pinned(const void* address) { return PinnedMemory::holds(address); }

void send_late(std::function<void()> write) {
  std::lock_guard lock(copies_mutex);
  copies.push_back(std::move(write));
}

uint64_t copies_sent() {
  std::lock_guard lock(copies_mutex);
  return copies_arrived + copies.size();
}

void let_copies_arrive(uint64_t count) {
  std::vector<std::function<void()>> arriving;
  {
    std::lock_guard lock(copies_mutex);
    auto number = std::min(copies.size(), static_cast<size_t>(count > copies_arrived ? count - copies_arrived : 0));
    arriving.assign(copies.begin(), copies.begin() + number);
    copies.erase(copies.begin(), copies.begin() + number);
    copies_arrived += number;
  }
  for (auto& write : arriving) write();
}

// ---- devices and streams ------------------------------------------------------------------------------------------------

c10::DeviceIndex current_device() { return device; }

void set_device(int64_t index) {
  TORCH_CHECK(index < kDevices, "CUDA error: invalid device ordinal");
  if (index >= 0) device = static_cast<c10::DeviceIndex>(index);  // torch passes -1 for "leave it"
}

c10::Stream current_stream(c10::DeviceIndex index) {
  auto found = streams.find(index);
  return stream_of(index, found == streams.end() ? 0 : found->second);
}

c10::Stream new_stream(c10::DeviceIndex index) { return stream_of(index, ++last_stream); }

void set_stream(c10::Stream stream) { streams[stream.device_index()] = stream.id(); }

void wait_on(c10::Stream stream, LateWork work) {
  if (stream.id() == 0) {
    for (auto& late : work) late->finish();
    return;
  }
  std::lock_guard lock(owed_mutex);
  auto& mine = owed[stream];
  mine.insert(mine.end(), work.begin(), work.end());
}

LateWork owed_by(c10::Stream stream) {
  std::lock_guard lock(owed_mutex);
  auto found = owed.find(stream);
  return found == owed.end() ? LateWork{} : found->second;
}

void settle(c10::Stream stream) {
  if (stream.id() == 0) return;
  LateWork work;
  {
    std::lock_guard lock(owed_mutex);
    auto found = owed.find(stream);
    if (found == owed.end()) return;
    work.swap(found->second);
  }
  for (auto& late : work) late->finish();
}

void wait_on_stream(LateWork work) { wait_on(current_stream(device), std::move(work)); }
LateWork owed_by_stream() { return owed_by(current_stream(device)); }

void Event::record(c10::Stream stream) {
  work_ = owed_by(stream);
  copies_ = copies_sent();
}

void Event::block(c10::Stream stream) const { wait_on(stream, work_); }

void Event::synchronize() const {
  for (auto& late : work_) late->finish();
  let_copies_arrive(copies_);
}

void synchronize_device() {
  std::vector<c10::Stream> all;
  {
    std::lock_guard lock(owed_mutex);
    for (auto& [stream, work] : owed) all.push_back(stream);
  }
  for (auto stream : all) settle(stream);
  let_copies_arrive(copies_sent());
}

namespace {

// What torch's C++ code asks of each device type: autograd switches devices and streams with it.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return cuda(device); }
  void setDevice(c10::Device to) const override { set_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) device = to.index();
  }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::DeviceIndex index_of(c10::Device of) { return of.has_index() ? of.index() : device; }
  c10::Stream getStream(c10::Device of) const override { return current_stream(index_of(of)); }
  c10::Stream getDefaultStream(c10::Device of) const override { return stream_of(index_of(of), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return new_stream(index_of(of)); }
  c10::Stream getNewStream(c10::Device of, int) const override { return new_stream(index_of(of)); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = current_stream(to.device_index());
    set_stream(to);
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override { static_cast<Event*>(event)->block(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeEvent(void* event) const override { static_cast<Event*>(event)->synchronize(); }
  void synchronizeStream(const c10::Stream&) const override { synchronize_device(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

// What a CPU build of torch asks of the CUDA build beside it.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return device; }
  c10::DeviceIndex getCurrentDevice() const override { return device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = device;
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  // Random numbers are the host's, so that a test draws the same ones on both.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

void register_allocators() {
  at::setHostAllocator(c10::DeviceType::CUDA, &pinned_memory, 255);
  c10::SetAllocator(c10::DeviceType::CUDA, &device_memory, 255);
}

}  // namespace simulated

namespace at {
using SimulatedGpuHooks = simulated::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedGpuHooks)
}  // namespace at
