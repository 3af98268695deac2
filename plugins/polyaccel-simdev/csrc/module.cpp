#include <torch/extension.h>

#include <cstdlib>
#include <string>

#include "comm.h"
#include "device.h"
#include "memory.h"
#include "ops.h"
#include "recording.h"
#include "streams.h"
#include "waits.h"

namespace {

long long setting(const char* name, long long otherwise) {
  const char* text = std::getenv(name);
  if (!text || !*text) return otherwise;
  try {
    return std::stoll(text);
  } catch (const std::exception&) {
    throw py::value_error(std::string(name) + "=" + text + " is not a whole number");
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto devices = c10::DeviceIndex(setting("POLYACCEL_SIMDEV_DEVICES", 2));
  simdev::set_up_streams(devices);
  simdev::set_up_memory(devices, size_t(setting("POLYACCEL_SIMDEV_CAPACITY", 1ll << 30)));
  simdev::set_delays(uint64_t(setting("POLYACCEL_SIMDEV_DELAYS", 0)));
  simdev::register_device();
  m.def("device_count", [] { return int(simdev::device_count()); });
  m.def("current_device", [] { return int(simdev::current_device()); });
  m.def("set_device", [](int device) { simdev::set_current_device(c10::DeviceIndex(device)); });
  m.def("default_generator", [](int device) { return simdev::default_generator(c10::DeviceIndex(device)); });
  m.def("synchronize", [](int device) {
    simdev::host_waits("synchronize of the device");
    simdev::synchronize_device(c10::DeviceIndex(device));
  },
        py::call_guard<py::gil_scoped_release>());
  m.def("end_queues", &simdev::end_queues, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [](int device) {
    const auto usage = simdev::usage(c10::DeviceIndex(device));
    return py::make_tuple(usage.allocated, usage.peak, usage.live, simdev::capacity());
  });
  m.def("reset_peak", [](int device) { simdev::reset_peak(c10::DeviceIndex(device)); });
  m.def("listen_to_waits", [](std::optional<py::function> listener) {
    if (!listener) return simdev::listen_to_waits(nullptr);
    // Never deleted: the last thread that waits may be one without the interpreter.
    const auto* kept = new py::function(*listener);
    simdev::listen_to_waits([kept](const char* what) {
      const py::gil_scoped_acquire locked;
      (*kept)(what);
    });
  });
  m.def("scale", &simdev::scale);
  m.def("keep_busy", [](int64_t milliseconds, int device) {
    simdev::keep_busy(milliseconds, c10::DeviceIndex(device));
  });
  py::class_<simdev::Recording, std::shared_ptr<simdev::Recording>>(m, "Recording")
      .def("play", [](const std::shared_ptr<simdev::Recording>& self) {
        simdev::play(self, simdev::current_stream(simdev::current_device()));
      });
  m.def("begin_recording", &simdev::begin_recording);
  m.def("end_recording", &simdev::end_recording);
  m.def("set_delays", [](uint64_t seed) { simdev::set_delays(seed); });
  m.def("make_comm", [](c10::intrusive_ptr<c10d::Backend> host, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<simdev::Comm>(std::move(host), rank, size);
  });
}
