#define ISA_TABLE ISA_AVX2
#define ISA_NAME "avx2"
#include "isa_body.h"
