#pragma once

#include <ATen/core/Tensor.h>

namespace simdev {

void scale(const at::Tensor& self, double factor);  // a kernel of the device: queued on the current stream
void keep_busy(int64_t milliseconds, c10::DeviceIndex device);  // lets the current stream sleep, for tests

}  // namespace simdev
