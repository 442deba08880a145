// Kernels that are named after what is wrong in them while kRepaired is false. A comment with that
// name marks the line that the report must show.
#include "cuda/tensor_table.cuh"
#include "program.h"

using amp_ext::cuda::pack_at;

struct Line {
  float values[64];
};

// The last thread has no neighbour.
template <bool kRepaired>
__global__ void past_shared(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  if (!kRepaired || i + 1 < blockDim.x) line.values[i + 1] = values[i];  // past_shared
  __syncthreads();
  if (i > 0) values[i] = line.values[i];
}

// Loads 16 bytes from an address that is no multiple of 16.
template <bool kRepaired>
__global__ void misaligned_load(float* values) {
  auto& pack = pack_at<4>(values + (kRepaired ? 0 : 1), 4 * threadIdx.x);
  for (float& value : pack.values) value *= 2.0f;
}

// Reads what another thread of the block writes. Threads that run in order give the right result.
template <bool kRepaired>
__global__ void missing_barrier(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  line.values[i] = values[i];
  if (kRepaired) __syncthreads();
  if (i > 0) values[i] = line.values[i - 1] + 1.0f;  // missing_barrier
}

// Hands a number to the next lane of the warp through shared memory, without __syncwarp in between.
template <bool kRepaired>
__global__ void missing_warp_barrier(float* values) {
  AMP_EXT_SHARED(Line, line);
  const unsigned i = threadIdx.x;
  line.values[i] = values[i];
  if (kRepaired) __syncwarp();
  if (i % 32 > 0) values[i] = line.values[i - 1] + 1.0f;  // missing_warp_barrier
}

// Has a barrier in a branch that only some threads of the block take.
template <bool kRepaired>
__global__ void divergent_barrier(float* met) {
  if (kRepaired || threadIdx.x < 16) {
    __syncthreads();  // divergent_barrier
  }
  atomicAdd(met, 1);
}

// Has a barrier in either branch: as many for each thread, but not the same.
template <bool kRepaired>
__global__ void two_barriers(float* met) {
  if (kRepaired || threadIdx.x < 16) {
    __syncthreads();  // two_barriers
  } else {
    __syncthreads();  // the other barrier
  }
  atomicAdd(met, 1);
}

// Shuffles with a mask that names lanes which do not come.
template <bool kRepaired>
__global__ void absent_lane(float* values) {
  float total = values[threadIdx.x];
  if (threadIdx.x >= 16) return;
  const unsigned mask = kRepaired ? 0x0000ffffu : 0xffffffffu;
  for (int delta = 8; delta > 0; delta /= 2) {
    total += __shfl_down_sync(mask, total, delta, 16);  // absent_lane
  }
  if (threadIdx.x == 0) *values = total;
}

// Shuffles from a lane that its mask does not name.
template <bool kRepaired>
__global__ void lane_outside_mask(float* values) {
  if (threadIdx.x < 16) return;
  const float first = __shfl_sync(0xffff0000u, values[threadIdx.x], kRepaired ? 16 : 0);
  values[threadIdx.x - 16] = first;
}

// Adds to a shared number that nobody has set to zero.
template <bool kRepaired>
__global__ void uninitialised_shared(float* values) {
  AMP_EXT_SHARED(float, total);
  if (kRepaired) {
    if (threadIdx.x == 0) total = 0.0f;
    __syncthreads();
  }
  atomicAdd(&total, values[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) *values = total;
}

// Passes more bytes of arguments than drivers take; repaired, as many as they take.
template <bool kRepaired>
struct Padding {
  char bytes[(kRepaired ? 32764 : 32768) - sizeof(float*)];
};
template <bool kRepaired>
__global__ void large_arguments(float* launched, const Padding<kRepaired> __grid_constant__) {
  *launched += 1.0f;
}

// Whether a kernel turns numbers into those that are expected, of which there may be fewer.
template <typename Kernel, typename... Arguments>
bool makes(const std::vector<float>& expected, std::vector<float> values, Kernel kernel,
           int64_t blocks, int threads, const Arguments&... arguments) {
  const int error = launch(kernel, blocks, threads, nullptr, values.data(), arguments...);
  if (error != cudaSuccess) std::fprintf(stderr, "the launch fails with error %d\n", error);
  return error == cudaSuccess && equal(values, expected);
}

#define RUN(expected, values, name, ...) \
  if (kernel == #name) return makes(expected, values, name<kRepaired>, __VA_ARGS__)

template <bool kRepaired>
bool run() {
  const auto line = multiples(64, 1.0f);
  const std::vector<float> zero(1);
  const std::vector<float> threes(64, 3.0f);
  RUN(threes, threes, past_shared, 1, 64);
  RUN(multiples(128, 2.0f), multiples(132, 1.0f), misaligned_load, 1, 32);
  RUN(line, line, missing_barrier, 1, 64);
  RUN(line, line, missing_warp_barrier, 1, 64);
  RUN({192.0f}, zero, divergent_barrier, 3, 64);
  RUN({64.0f}, zero, two_barriers, 1, 64);
  RUN({120.0f}, multiples(32, 1.0f), absent_lane, 1, 32);
  RUN(std::vector<float>(16, 16.0f), multiples(32, 1.0f), lane_outside_mask, 1, 32);
  RUN({2016.0f}, line, uninitialised_shared, 1, 64);
  RUN({1.0f}, zero, large_arguments, 1, 1, Padding<kRepaired>{});
  std::fprintf(stderr, "there is no kernel %s\n", kernel.c_str());
  return false;
}
