// Everything that the kernels take from CUDA, in one place.
#pragma once

#if defined(AMP_EXT_CUDA_EMULATOR)
#include <cuda_emulator.h>  // from tests/: the same names for g++, with threads on the CPU
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// A variable that the threads of a block share. It starts uninitialised.
#define AMP_EXT_SHARED(Type, name) __shared__ Type name
#endif

#include <cstdint>

#if defined(__CUDACC__) || defined(AMP_EXT_CUDA_EMULATOR)

#include "elements/storage.h"

namespace amp_ext::cuda {

// Starts a kernel and returns the error code of the launch.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
           const Arguments&... arguments) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  static_cast<void>(stream);
  cuda_emulator::launch(kernel, blocks, threads, arguments...);
#else
  // clang-format off
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  // clang-format on
#endif
  return static_cast<int>(cudaGetLastError());
}

// The processor's own conversions of 16-bit numbers; rounding to nearest even.
__device__ __forceinline__ float load_as_float(Half value) {
  return __half2float(__ushort_as_half(value.bits));
}
__device__ __forceinline__ float load_as_float(BFloat16 value) {
  return __bfloat162float(__ushort_as_bfloat16(value.bits));
}
__device__ __forceinline__ void store_float(float value, Half& stored) {
  stored.bits = __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ void store_float(float value, BFloat16& stored) {
  stored.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

}  // namespace amp_ext::cuda

#endif
