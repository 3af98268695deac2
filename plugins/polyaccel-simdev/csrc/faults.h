// Faults that can be switched on to see whether tests notice them: POLYACCEL_SIMDEV_FAULT, names separated by commas.
//
//   slow_copy            an asynchronous copy is not waited for by its stream
//   late_stream          a stream does not wait for the events that it should wait for
//   failing_allocation   32 MiB and more are refused although they are free
//   wrong_kernel         the scaling kernel turns NaN into zero
#pragma once

#include <string_view>

namespace simdev {

bool has_fault(std::string_view name);

}  // namespace simdev
