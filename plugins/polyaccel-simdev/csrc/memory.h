// Device memory: one arena a device, mapped twice.
// Tensors carry addresses of the first mapping, which must not be read or written: host code that takes a device
// pointer for its own dies at once, as it would with a chip's memory. Work on the streams uses the second mapping.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace simdev {

struct Usage {
  int64_t allocated = 0;  // bytes
  int64_t peak = 0;       // since the last reset
  int64_t live = 0;       // allocations
};

void set_up_memory(c10::DeviceIndex devices, size_t capacity);  // capacity in bytes, of each device
size_t capacity();

// Zeroed, or full of NaN where work is delayed; throws c10::OutOfMemoryError. Freed memory is given out again when the
// work is done that is queued by then on the stream that was current now and on those of `record_use`, and no others.
c10::DataPtr allocate(size_t nbytes, c10::DeviceIndex device);
void record_use(const void* address, c10::Stream stream);  // of an allocation that begins there
Usage usage(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void* host_address(const void* device_address);  // in the second mapping; the address itself if it is not a device's
c10::Allocator* device_allocator();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace simdev
