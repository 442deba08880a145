// The CPU kernels for any processor, with 16-byte vectors, which every x86-64 processor has.
#include "cpu/standard_headers.h"

#define AMP_EXT_ISA plain
#define AMP_EXT_VECTOR_BYTES 16
#include "cpu/engine_body.h"
