// The CPU kernels for AVX-512.
#include "cpu/standard_headers.h"

#if defined(__x86_64__)
AMP_EXT_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define AMP_EXT_ISA avx512
#define AMP_EXT_VECTOR_BYTES 64
#include "cpu/engine_body.h"
AMP_EXT_END_TARGET
#endif
