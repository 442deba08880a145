// CUDA's execution model on the CPU, for tests: csrc/cuda/platform.h includes this file in place of
// CUDA's headers, and g++ compiles the kernels as they are.
//
// Every thread of a block is a fiber. It runs until it waits for its block or for its warp; when
// all fibers wait, those that have met go on. Blocks run one after another. Shared memory holds
// 0xff when a block starts, and arguments are copied, as the driver does.
//
// What CUDA does not allow is an exception here that names block, thread, source line and function:
// a barrier that some threads do not reach, or pass at another line; a warp function whose mask
// names lanes that do not come; a shuffle from a lane outside the mask. Sanitizers find the rest:
// address and undefined see accesses out of bounds and misaligned ones, thread sees missing
// barriers.
//
// Unseen: races between blocks, a missing __threadfence, streams, what only nvcc refuses, and
// speed. Offered is what kernels here call, so no other shuffles, votes and atomics, dimensions
// beyond x, dynamic shared memory, __activemask, nor waiting for another block.
//
// Environment, read at every launch:
//   CUDA_EMULATOR_SEED             runs threads and blocks in a random order instead of in order
//   CUDA_EMULATOR_DRIVER_VERSION   what cudaDriverGetVersion gives, 13000 if not set
//   CUDA_EMULATOR_REFUSED_LAUNCH   refuses the launch of this number, from 0; another text
//                                  behind the number begins to count anew
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "formats/storage.h"

namespace cuda_emulator {

// A kernel did what CUDA does not allow.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The line of a kernel that calls a function of CUDA. As a default argument, `Site::of("name")` is
// the line of the call.
struct Site {
  const char* called;
  const char* file;
  int line;
  const char* function;

  static constexpr Site of(const char* called, const char* file = __builtin_FILE(),
                           int line = __builtin_LINE(),
                           const char* function = __builtin_FUNCTION()) {
    return {called, file, line, function};
  }
};

// Waits for all threads of the block. Returns for how many of them the predicate holds.
int meet_block(bool predicate, const Site& site);

// Waits for the lanes of `mask`, this one among them. Returns what each has brought, by lane.
const uint64_t* meet_warp(uint32_t mask, uint64_t value, const Site& site);

// Like meet_warp, and orders memory among these lanes; shuffles and votes do not promise to.
void synchronize_warp(uint32_t mask, const Site& site);

// The lane of this thread in its warp.
int lane();

// Throws an Error that names this thread.
[[noreturn]] void fail(const Site& site, const char* text);

// The memory of a variable that this block shares; the address of `variable` tells it from others.
void* shared_memory(const void* variable, size_t bytes, size_t alignment);

struct Grid {
  const void* kernel;
  const void* arguments;
  size_t argument_bytes;
  void (*call)(const void* kernel, const void* arguments);  // for the current thread
  int64_t blocks;
  int threads;
};

// Runs a kernel to its end, or sets the error that cudaGetLastError returns.
void run(const Grid& grid);

// What kernel<<<blocks, threads>>>(arguments...) does.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads,
            const Arguments&... arguments) {
  using Copies = std::tuple<std::decay_t<Parameters>...>;
  const Copies copies(arguments...);
  const auto call = [](const void* function, const void* values) {
    std::apply(reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(function)),
               *static_cast<const Copies*>(values));
  };
  const size_t bytes = (size_t{0} + ... + sizeof(std::decay_t<Parameters>));
  run({reinterpret_cast<const void*>(kernel), &copies, bytes, call, blocks, threads});
}

template <typename T>
T shuffle(uint32_t mask, T value, int source, const Site& site) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t brought = 0;
  memcpy(&brought, &value, sizeof value);
  const uint64_t* const received = meet_warp(mask, brought, site);
  if ((mask >> source & 1) == 0) fail(site, "reads from a lane outside its mask");
  memcpy(&value, received + source, sizeof value);
  return value;
}

// Whether the predicate holds in any lane of the mask.
bool vote(uint32_t mask, bool predicate, const Site& site);

// The number of votes so far, and of those in which the predicate held in a lane. Tests count by it
// how many packs leave the fast path of a step.
extern "C" void cuda_emulator_votes(int64_t* taken, int64_t* held);

// What the instruction PRMT makes of two words.
uint32_t select_bytes(uint32_t first, uint32_t second, uint32_t selector);

// Applies change(old) to memory that other threads touch, and returns the old value.
template <typename T, typename Change>
T update_atomically(T* address, const Change& change) {
  T old;
  __atomic_load(address, &old, __ATOMIC_RELAXED);
  for (;;) {
    T changed = change(old);
    if (__atomic_compare_exchange(address, &old, &changed, false, __ATOMIC_RELAXED,
                                  __ATOMIC_RELAXED)) {
      return old;
    }
  }
}

}  // namespace cuda_emulator

// The language.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__ &  // stands after the type: all threads read the driver's copy

#define AMP_EXT_SHARED(Type, name)                                                             \
  static_assert(std::is_trivially_default_constructible_v<Type>, "nvcc wants no constructor"); \
  static char variable_of_##name;                                                              \
  Type& name = *static_cast<Type*>(                                                            \
      cuda_emulator::shared_memory(&variable_of_##name, sizeof(Type), alignof(Type)))

struct Dimensions {
  unsigned x = 1;
};
extern Dimensions threadIdx, blockIdx, blockDim, gridDim;
inline constexpr int warpSize = 32;

// The block.

inline void __syncthreads(
    const cuda_emulator::Site& site = cuda_emulator::Site::of("__syncthreads")) {
  cuda_emulator::meet_block(false, site);
}
inline int __syncthreads_or(
    int predicate, const cuda_emulator::Site& site = cuda_emulator::Site::of("__syncthreads_or")) {
  return cuda_emulator::meet_block(predicate != 0, site) != 0;
}

// The warp.

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       const cuda_emulator::Site& site = cuda_emulator::Site::of("__syncwarp")) {
  cuda_emulator::synchronize_warp(mask, site);
}

// A shuffle that would leave its segment of `width` lanes gives the thread its own value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              const cuda_emulator::Site& site = cuda_emulator::Site::of("__shfl_sync")) {
  const int first = cuda_emulator::lane() / width * width;
  return cuda_emulator::shuffle(mask, value, first + (source & (width - 1)), site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   const cuda_emulator::Site& site = cuda_emulator::Site::of("__shfl_down_sync")) {
  const int lane = cuda_emulator::lane();
  const int source = lane + static_cast<int>(delta);
  const int end = (lane / width + 1) * width;
  return cuda_emulator::shuffle(mask, value, source < end ? source : lane, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize,
                  const cuda_emulator::Site& site = cuda_emulator::Site::of("__shfl_xor_sync")) {
  const int lane = cuda_emulator::lane();
  const int source = lane ^ lanes;
  return cuda_emulator::shuffle(mask, value, source / width == lane / width ? source : lane, site);
}

inline int __any_sync(unsigned mask, int predicate,
                      const cuda_emulator::Site& site = cuda_emulator::Site::of("__any_sync")) {
  return cuda_emulator::vote(mask, predicate != 0, site);
}

// Memory.

inline void __threadfence() { asm volatile("" ::: "memory"); }

template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return cuda_emulator::update_atomically(address, [&](T old) { return old + value; });
}
// Counts up to `last`, then begins with 0 again.
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return cuda_emulator::update_atomically(address,
                                          [&](unsigned old) { return old >= last ? 0 : old + 1; });
}
template <typename T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return cuda_emulator::update_atomically(address, [&](T) { return value; });
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return cuda_emulator::update_atomically(address,
                                          [&](T old) { return value < old ? value : old; });
}

// Numbers.

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline float __half2float(__half value) { return amp_ext::to_float(amp_ext::Half{value.bits}); }
inline float __bfloat162float(__nv_bfloat16 value) {
  return amp_ext::to_float(amp_ext::BFloat16{value.bits});
}
inline __half __float2half_rn(float value) {
  amp_ext::Half rounded;
  amp_ext::from_float(value, rounded);
  return {rounded.bits};
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  amp_ext::BFloat16 rounded;
  amp_ext::from_float(value, rounded);
  return {rounded.bits};
}

// The runtime. Kernels have run when a launch returns.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701
};
using cudaStream_t = struct CUstream_st*;

cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
