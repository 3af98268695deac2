#include "memory.h"

#include "faults.h"
#include "streams.h"
#include "waits.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace simdev {
namespace {

constexpr size_t kUnit = 512;                 // allocations start and end on multiples of it
constexpr size_t kFailingNbytes = 32u << 20;  // what the fault "failing_allocation" refuses

size_t rounded_up(size_t nbytes) { return (nbytes + kUnit - 1) / kUnit * kUnit; }

// The memory of one device, given out first fit.
class Arena {
 public:
  explicit Arena(size_t capacity) : capacity_(capacity) {
    file_ = memfd_create("simdev", MFD_CLOEXEC);
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, off_t(capacity)) == 0, "simdev memory: ", std::strerror(errno));
    device_ = map(PROT_NONE);
    host_ = map(PROT_READ | PROT_WRITE);
    free_[0] = capacity;
  }

  void* take(size_t nbytes, c10::StreamId stream) {  // nullptr when there is no room
    const size_t wanted = rounded_up(nbytes);
    std::lock_guard lock(mutex_);
    for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
      if (hole->second < wanted) continue;
      const auto [start, length] = *hole;
      free_.erase(hole);
      if (length > wanted) free_[start + wanted] = length - wanted;
      taken_[start] = {wanted, {stream}};
      usage_.allocated += int64_t(wanted);
      usage_.peak = std::max(usage_.peak, usage_.allocated);
      ++usage_.live;
      return device_ + start;
    }
    return nullptr;
  }

  void record_use(const void* address, c10::StreamId stream) {
    std::lock_guard lock(mutex_);
    const auto taken = taken_.find(offset_of(address));
    if (taken != taken_.end()) taken->second.streams.insert(stream);
  }

  // Counts an allocation as free, and says whose work comes before it may be given out again.
  std::set<c10::StreamId> release(void* address) {
    std::lock_guard lock(mutex_);
    const auto taken = taken_.find(offset_of(address));
    usage_.allocated -= int64_t(taken->second.length);
    --usage_.live;
    return taken->second.streams;
  }

  void give(void* address) {
    const size_t start = offset_of(address);
    std::lock_guard lock(mutex_);
    const auto taken = taken_.find(start);
    size_t first = start, length = taken->second.length;
    taken_.erase(taken);
    if (are_delayed()) {
      std::memset(host_ + start, 0xff, length);  // so that nobody finds by chance what he should not look for
    } else {
      fallocate_hole(start, length);  // the pages go back to the system, and the next owner finds zeros
    }
    auto next = free_.lower_bound(start);
    if (next != free_.end() && next->first == start + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == start) {
        first = before->first;
        length += before->second;
        free_.erase(before);
      }
    }
    free_[first] = length;
  }

  bool owns(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= device_ && at < device_ + capacity_;
  }

  void* host_address(const void* address) const { return host_ + (static_cast<const char*>(address) - device_); }

  Usage usage() {
    std::lock_guard lock(mutex_);
    return usage_;
  }

  void reset_peak() {
    std::lock_guard lock(mutex_);
    usage_.peak = usage_.allocated;
  }

 private:
  struct Block {
    size_t length;
    std::set<c10::StreamId> streams;
  };

  size_t offset_of(const void* address) const { return size_t(static_cast<const char*>(address) - device_); }

  char* map(int protection) {
    void* start = mmap(nullptr, capacity_, protection, MAP_SHARED | MAP_NORESERVE, file_, 0);
    TORCH_CHECK(start != MAP_FAILED, "simdev memory: ", std::strerror(errno));
    return static_cast<char*>(start);
  }

  // Zeros small pieces and frees the whole pages of large ones.
  void fallocate_hole(size_t start, size_t length) {
    constexpr size_t kPage = 4096;
    const size_t first = (start + kPage - 1) / kPage * kPage, last = (start + length) / kPage * kPage;
    if (first >= last) {
      std::memset(host_ + start, 0, length);
      return;
    }
    std::memset(host_ + start, 0, first - start);
    std::memset(host_ + last, 0, start + length - last);
    TORCH_CHECK(madvise(host_ + first, last - first, MADV_REMOVE) == 0, "simdev memory: ", std::strerror(errno));
  }

  size_t capacity_;
  int file_ = -1;
  char* device_ = nullptr;
  char* host_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;                // start -> length
  std::unordered_map<size_t, Block> taken_;      // by its start
  Usage usage_;
};

// Lives until the process ends: tensors may outlive every static object.
std::vector<std::unique_ptr<Arena>>& arenas() {
  static auto* all = new std::vector<std::unique_ptr<Arena>>();
  return *all;
}

size_t g_capacity = 0;

void free_device(void* address) {
  for (size_t device = 0; address && device < arenas().size(); ++device) {
    auto* arena = arenas()[device].get();
    if (!arena->owns(address)) continue;
    const auto streams = arena->release(address);
    const auto left = std::make_shared<std::atomic<size_t>>(streams.size());
    const auto give = [arena, address, left] {
      if (--*left == 0) arena->give(address);
    };
    for (const auto id : streams) {
      const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, c10::DeviceIndex(device)), id);
      if (is_idle(stream)) {
        give();
      } else {
        enqueue_now(stream, give);
      }
    }
  }
}

c10::CachingDeviceAllocator::DeviceStats as_stats(const Usage& usage) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto bytes = [&usage](auto& both) {
    both[0].increase(size_t(usage.peak));
    both[0].decrease(size_t(usage.peak - usage.allocated));
  };
  bytes(stats.allocated_bytes);
  bytes(stats.reserved_bytes);
  bytes(stats.active_bytes);
  stats.allocation[0].increase(size_t(usage.live));
  return stats;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return simdev::allocate(nbytes, current_device()); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(host_address(to), host_address(from), nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}  // nothing is kept
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override { record_use(memory.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return as_stats(usage(device));
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {g_capacity - size_t(usage(device).allocated), g_capacity};
  }
};

// Page-locked host memory in name: ordinary pages, remembered.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<const char*, size_t> live;

  static PinnedAllocator& instance() {
    static auto* one = new PinnedAllocator();
    return *one;
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* start = nullptr;
    if (nbytes) {
      TORCH_CHECK(posix_memalign(&start, 4096, nbytes) == 0, "no host memory for ", nbytes, " pinned bytes");
      std::lock_guard lock(mutex);
      live[static_cast<const char*>(start)] = nbytes;
    }
    return {start, start, &give_back, c10::Device(c10::kCPU)};
  }
  static void give_back(void* start) {
    if (!start) return;
    {
      std::lock_guard lock(instance().mutex);
      instance().live.erase(static_cast<const char*>(start));
    }
    std::free(start);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

}  // namespace

void set_up_memory(c10::DeviceIndex devices, size_t capacity) {
  g_capacity = capacity / kUnit * kUnit;
  for (int device = 0; device < devices; ++device) arenas().push_back(std::make_unique<Arena>(g_capacity));
}

size_t capacity() { return g_capacity; }

c10::DataPtr allocate(size_t nbytes, c10::DeviceIndex device) {
  const c10::Device where(c10::kPrivateUse1, device);
  if (nbytes == 0) return {nullptr, nullptr, &free_device, where};
  const bool refuses = has_fault("failing_allocation") && nbytes >= kFailingNbytes;
  auto& arena = *arenas().at(size_t(device));
  const auto stream = current_stream(device).id();
  void* start = refuses ? nullptr : arena.take(nbytes, stream);
  if (!start && !refuses) {  // what was freed comes back when the work is done that is queued
    const Simulation simulation;
    synchronize_device(device);
    start = arena.take(nbytes, stream);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, start, "simdev:", int(device), " is out of memory: ", nbytes, " bytes asked, ",
                   usage(device).allocated, " of ", g_capacity, " in use (POLYACCEL_SIMDEV_CAPACITY)");
  return {start, start, &free_device, where};
}

void record_use(const void* address, c10::Stream stream) {
  for (auto& arena : arenas()) {
    if (arena->owns(address)) arena->record_use(address, stream.id());
  }
}

Usage usage(c10::DeviceIndex device) { return arenas().at(size_t(device))->usage(); }

void reset_peak(c10::DeviceIndex device) { arenas().at(size_t(device))->reset_peak(); }

void* host_address(const void* address) {
  for (auto& arena : arenas()) {
    if (arena->owns(address)) return arena->host_address(address);
  }
  return const_cast<void*>(address);
}

c10::Allocator* device_allocator() {
  static auto* one = new DeviceAllocator();
  return one;
}

c10::Allocator* pinned_allocator() { return &PinnedAllocator::instance(); }

bool is_pinned(const void* address) {
  auto& pinned = PinnedAllocator::instance();
  const auto* at = static_cast<const char*>(address);
  std::lock_guard lock(pinned.mutex);
  auto after = pinned.live.upper_bound(at);
  if (after == pinned.live.begin()) return false;
  const auto& [start, nbytes] = *std::prev(after);
  return at < start + nbytes;
}

}  // namespace simdev
