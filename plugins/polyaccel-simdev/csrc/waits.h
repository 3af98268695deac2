// What would make the host wait for a device whose work is asynchronous, reported to a listener.
// The simulation waits more often, for its own purposes: those waits do not count.
#pragma once

#include <functional>

namespace simdev {

// Calls `listener` for each wait of a thread of the host, with what waits. An empty one ends it.
void listen_to_waits(std::function<void(const char* what)> listener);

void host_waits(const char* what);

// Waits while one lives, in this thread, are the simulation's own.
class Simulation {
 public:
  Simulation();
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;
};

}  // namespace simdev
