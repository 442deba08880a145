// The CPU kernels for any processor: vectors of 16 bytes, which all x86-64 processors have.
#include "cpu/standard_headers.h"

#define AMP_EXT_ISA plain
#define AMP_EXT_VECTOR_BYTES 16
#include "cpu/engine_body.h"
