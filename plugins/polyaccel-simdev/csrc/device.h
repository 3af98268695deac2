// What torch asks of a device: which is current, its streams and events, its generators.
#pragma once

#include <ATen/core/Generator.h>

namespace simdev {

void register_device();  // once
const at::Generator& default_generator(c10::DeviceIndex device);  // -1: the current one

}  // namespace simdev
