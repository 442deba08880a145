// Everything that the kernels take from CUDA, in one place.
#pragma once

#if defined(AMP_EXT_CUDA_EMULATOR)
#include <cuda_emulator.h>  // in tests/: emulates CUDA with g++ and threads on the CPU
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// A variable that the threads of a block share. It starts uninitialised.
#define AMP_EXT_SHARED(Type, name) __shared__ Type name
#endif

#include <cstdint>

#if defined(__CUDACC__) || defined(AMP_EXT_CUDA_EMULATOR)

#include "formats/storage.h"

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

// Conversions of 16-bit numbers by the GPU's instructions; rounding is to nearest even.
__device__ __forceinline__ float load(Half value) {
  return __half2float(__ushort_as_half(value.bits));
}
__device__ __forceinline__ float load(BFloat16 value) {
  return __bfloat162float(__ushort_as_bfloat16(value.bits));
}
__device__ __forceinline__ void store(float value, Half& stored) {
  stored.bits = __half_as_ushort(__float2half_rn(value));
}
__device__ __forceinline__ void store(float value, BFloat16& stored) {
  stored.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Prefetches the cache line of the element kAhead elements after `element`, if `there` is true.
// Uses a predicate: after a branch, the threads of a warp would have to reconverge.
template <int kAhead, typename Storage>
__device__ __forceinline__ void prefetch([[maybe_unused]] const Storage* element,
                                         [[maybe_unused]] bool there) {
#if !defined(AMP_EXT_CUDA_EMULATOR)
  asm volatile(
      "{\n"
      "  .reg .pred there;\n"
      "  setp.ne.u32 there, %2, 0;\n"
      "  @there prefetch.global.L2 [%0+%1];\n"
      "}" ::"l"(element),
      "n"(kAhead * sizeof(Storage)), "r"(static_cast<uint32_t>(there)));
#endif
}

// Returns four bytes of two words. Each of the lower four hex digits of `selector` names a byte: 0
// to 3 in `first`, 4 to 7 in `second`. A digit plus 8 gives copies of the byte's sign bit.
__device__ __forceinline__ uint32_t select_bytes(uint32_t first, uint32_t second,
                                                 uint32_t selector) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  return cuda_emulator::select_bytes(first, second, selector);
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
#endif
}

// Rounds two numbers to bfloat16, to nearest even. The first is in the lower half of the result.
__device__ __forceinline__ uint32_t two_bfloat16(float first, float second) {
#if defined(AMP_EXT_CUDA_EMULATOR)
  BFloat16 pair[2];
  store(first, pair[0]);
  store(second, pair[1]);
  return pair[0].bits | (uint32_t{pair[1].bits} << 16);
#else
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
#endif
}

// Approximations for formulas/fast_division.h, with errors of up to two units in the last place.
struct Seeds {
  static __device__ __forceinline__ float inverse_root(float value) {
#if defined(AMP_EXT_CUDA_EMULATOR)
    return static_cast<float>(1.0 / std::sqrt(static_cast<double>(value)));
#else
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#endif
  }
  static __device__ __forceinline__ float reciprocal(float value) {
#if defined(AMP_EXT_CUDA_EMULATOR)
    return 1.0f / value;
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
#endif
  }
};

}  // namespace amp_ext::cuda

#endif
