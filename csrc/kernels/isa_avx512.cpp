#define ISA_TABLE ISA_AVX512
#define ISA_NAME "avx512"
#include "isa_body.h"
