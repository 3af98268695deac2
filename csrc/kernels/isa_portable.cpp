// What every processor of the architecture has: SSE2 on x86-64, NEON on 64-bit ARM.
#define ISA_TABLE ISA_PORTABLE
#if defined(__aarch64__)
#define ISA_NAME "neon"
#else
#define ISA_NAME "portable"
#endif
#include "isa_body.h"
