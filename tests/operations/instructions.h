// Chooses the instruction set of a test program, as csrc/cpu/engine_*.cpp do, by
// AMP_EXT_VECTOR_BYTES. To be included after all standard headers and before any of the vectors;
// AMP_EXT_END_TARGET ends the program.
#pragma once

#include "cpu/standard_headers.h"

#if AMP_EXT_VECTOR_BYTES == 64
AMP_EXT_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define LACKS_INSTRUCTIONS !__builtin_cpu_supports("avx512vl")
#elif AMP_EXT_VECTOR_BYTES == 32
AMP_EXT_TARGET("avx2,fma,f16c")
#define LACKS_INSTRUCTIONS !__builtin_cpu_supports("avx2")
#else
#define LACKS_INSTRUCTIONS false
#undef AMP_EXT_END_TARGET
#define AMP_EXT_END_TARGET
#endif
