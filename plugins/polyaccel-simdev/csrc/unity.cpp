// All sources as one: torch's headers take ten seconds a file to read, and the code itself none.
#include "faults.cpp"
#include "waits.cpp"
#include "streams.cpp"
#include "memory.cpp"
#include "device.cpp"
#include "ops.cpp"
#include "comm.cpp"
#include "module.cpp"
