// Sharing out a kernel's work among threads of our own.
//
// Not OpenMP: its run-time would be a second one beside torch's (whose threads spin for a while after each region), or
// one that the machine lacks. Threads are made when first asked for and sleep between calls.
#pragma once

#include <stdint.h>

// Calls `task(context, part)` for each part in [0, parts) on up to `threads` threads, this one included, and returns
// when all are done. Any thread may get any part. A caller that finds the threads busy, or that cannot start any, does
// the work alone. A forked child starts threads of its own.
void parallel_for(int64_t parts, int32_t threads, void (*task)(void* context, int64_t part), void* context);
