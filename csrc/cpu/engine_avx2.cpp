// The CPU kernels for AVX2.
#include "cpu/standard_headers.h"

#if defined(__x86_64__)
AMP_EXT_TARGET("avx2,fma,f16c")
#define AMP_EXT_ISA avx2
#define AMP_EXT_VECTOR_BYTES 32
#include "cpu/engine_body.h"
AMP_EXT_END_TARGET
#endif
