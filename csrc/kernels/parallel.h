// Sharing out a kernel's work among threads of our own.
//
// Not linked to OpenMP: its run-time would be a second one, or one that the machine lacks. But where one is
// loaded already, its threads do the work: after each of torch's regions they spin for some milliseconds, and threads of
// our own would have to share the cores with them (an update by two threads took 1.3 times as long). Else threads are
// made when first asked for and sleep between calls.
#pragma once

#include <stdint.h>

// Calls `task(context, part)` for each part in [0, parts) on up to `threads` threads, this one included, and returns
// when all are done. Any thread may get any part. A caller that finds the threads busy, or that cannot start any, does
// the work alone. A forked child starts its own threads.
void parallel_for(int64_t parts, int32_t threads, void (*task)(void* context, int64_t part), void* context);
