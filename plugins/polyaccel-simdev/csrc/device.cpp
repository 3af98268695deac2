#include "device.h"

#include "memory.h"
#include "streams.h"
#include "waits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <vector>

namespace simdev {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  Device getDevice() const override { return Device(c10::kPrivateUse1, current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() < device_count()) set_current_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override { return default_stream(device.index()); }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("synchronize of a stream");
    synchronize(stream);
  }
  void synchronizeDevice(DeviceIndex device) const override {
    host_waits("synchronize of the device");
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    record_use(memory.get(), stream);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->record(stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) static_cast<Event*>(event)->block(stream);
  }
  bool queryEvent(void* event) const override { return !event || static_cast<Event*>(event)->is_reached(); }
  void synchronizeEvent(void* event) const override {
    host_waits("synchronize of an event");
    if (event) static_cast<Event*>(event)->synchronize();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    return static_cast<Event*>(from)->milliseconds_until(*static_cast<Event*>(to));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's engine with its own state.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex device) {
    device_ = Device(c10::kPrivateUse1, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kPrivateUse1, current_device()); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const auto device = storage.device().index();
    auto memory = allocate(nbytes, device);
    if (const auto kept = std::min(nbytes, storage.nbytes())) {
      const Simulation simulation;
      synchronize(current_stream(device));
      std::memcpy(host_address(memory.get()), host_address(storage.data()), kept);
    }
    auto& owner = const_cast<c10::Storage&>(storage);
    owner.set_data_ptr_noswap(std::move(memory));
    owner.set_nbytes(nbytes);
  }
};

}  // namespace

void register_device() {
  c10::SetAllocator(c10::kPrivateUse1, device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int index = 0; index < device_count(); ++index) {
      all->push_back(at::make_generator<DeviceGenerator>(DeviceIndex(index)));
    }
    return all;
  }();
  return generators->at(size_t(device < 0 ? current_device() : device));
}

}  // namespace simdev
